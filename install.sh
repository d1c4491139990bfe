#!/usr/bin/env bash
# Try this checkout, or test it. What is said goes to standard error: standard output is the demo's.
set -euo pipefail

checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=${APPLIANCE_VENV:-$checkout/.venv}
readonly checkout venv

readonly EX_USAGE=64 EX_UNAVAILABLE=69
readonly NEWEST_MINOR=13 OLDEST_MINOR=11

# What the tests call, and the Debian package it comes in.
readonly TEST_PROGRAMS="
systemd-nspawn systemd-container
debootstrap debootstrap
strace strace
shellcheck shellcheck
git git
"

usage() {
    cat <<'USAGE'
Usage: ./install.sh --try [ARGUMENT...]    run the demo: a real model, on this machine, as you
       ./install.sh --test [ARGUMENT...]   run every test; arguments go to pytest
       ./install.sh --help

--try needs Linux, Python 3.11 to 3.13 and 6 GB of disk (see PIP_* below); no root, no systemd, no GPU. It installs into
.venv in this checkout and keeps the model below ~/.cache/appliance; delete both to be rid of it. ARGUMENTs go to
`appliance demo`: try --json.

--test run as root also installs the Debian packages that the tests use. Without root it says which tests are skipped.

Environment:
  PYTHON          the Python to use
  APPLIANCE_VENV  the virtual environment to make and use, instead of .venv in this checkout
  PIP_*           pip's own settings. On x86-64, PyPI's torch brings 3 GB of GPU libraries, 5 GB once unpacked; name
                  PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL to be spared them.
USAGE
}

main() {
    local action=${1-}
    [[ $# -eq 0 ]] || shift
    case $action in
    --try) try_it "$@" ;;
    --test) run_tests "$@" ;;
    -h | --help) usage ;;
    '') install_on_host ;;
    *)
        usage >&2
        die $EX_USAGE "$action: unknown option"
        ;;
    esac
}

try_it() {
    require_linux
    if [[ $EUID -eq 0 ]]; then
        say "running as root, which this does not need: an ordinary user can do the same"
    fi
    make_venv
    install_package demo
    say "running: appliance demo $*"
    exec "$venv/bin/appliance" demo "$@"
}

run_tests() {
    require_linux
    install_test_programs
    make_venv
    install_package dev
    cd -- "$checkout"
    say "running: python -m pytest $*"
    exec "$venv/bin/python" -m pytest "$@"
}

install_on_host() {
    usage >&2
    die $EX_UNAVAILABLE "installing on this host, with systemd units, is not there yet" \
        "--try runs the demo; after it, $venv/bin/appliance up --manifest FILE runs one in the foreground"
}

require_linux() {
    [[ $(uname -s) == Linux ]] || die $EX_UNAVAILABLE "this is $(uname -s): weights are kept in Linux memory files"
}

install_test_programs() {
    local program package packages=()
    while read -r program package; do
        [[ -z $program ]] || command -v "$program" >/dev/null || packages+=("$package")
    done <<<"$TEST_PROGRAMS"
    [[ ${#packages[@]} -gt 0 ]] || return 0
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        say "not installed: ${packages[*]}; the tests that need them are skipped"
        return 0
    fi
    say "installing Debian packages: ${packages[*]}"
    if ! apt_install "${packages[@]}"; then
        say "not with the package lists that are here: fetching new ones"
        apt-get update -q >&2
        apt_install "${packages[@]}"
    fi
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" >&2 </dev/null
}

# Make $venv, or keep it if it works and is where it was made.
make_venv() {
    local python made_at=$venv/.made-at
    if [[ -x $venv/bin/python ]] && is_usable "$venv/bin/python" pip; then
        # Scripts in a virtual environment name its place: one that was moved runs the other checkout's code.
        if [[ ! -e $made_at || $(<"$made_at") == "$venv" ]]; then
            say "using the virtual environment $venv"
            return 0
        fi
    fi
    if [[ -e $venv && ! -e $venv/pyvenv.cfg ]] && [[ -n $(ls -A -- "$venv") ]]; then
        die $EX_USAGE "$venv: exists and is not a virtual environment" "move it away, or set APPLIANCE_VENV"
    fi
    [[ -w $(dirname -- "$venv") ]] || die $EX_USAGE "$(dirname -- "$venv"): you cannot write there" \
        "clone it as this user, or set APPLIANCE_VENV to a place of your own"
    python=$(choose_python)
    say "making the virtual environment $venv with $("$python" --version)"
    "$python" -m venv --clear -- "$venv" >&2
    printf '%s\n' "$venv" >"$made_at"
}

# Print the first Python that is new enough and can make a virtual environment.
choose_python() {
    local candidate found package lacking=''
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.{13,12,11}; do
        found=$(command -v "$candidate") || continue
        if is_usable "$found" venv ensurepip; then
            printf '%s\n' "$found"
            return 0
        fi
        if is_usable "$found"; then
            lacking=${lacking:-$found}
        fi
        [[ -z ${PYTHON-} ]] || break
    done
    if [[ -n $lacking ]]; then
        package=$("$lacking" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')
        die $EX_UNAVAILABLE "$lacking cannot make a virtual environment" "apt-get install $package"
    fi
    die $EX_UNAVAILABLE "no Python 3.$OLDEST_MINOR to 3.$NEWEST_MINOR here${PYTHON:+ (PYTHON is $PYTHON)}" \
        "apt-get install python3 python3-venv"
}

# is_usable PYTHON [MODULE...]: whether its version is one of ours and it has these modules.
is_usable() {
    local python=$1
    shift
    "$python" - "$OLDEST_MINOR" "$NEWEST_MINOR" "$@" 2>/dev/null <<'PROBE'
import importlib, sys
oldest, newest, *modules = sys.argv[1:]
if not (3, int(oldest)) <= sys.version_info[:2] <= (3, int(newest)):
    sys.exit(1)
for name in modules:
    importlib.import_module(name)
PROBE
}

# install_package EXTRA: install this checkout with one of pyproject.toml's extras, unless that was done already.
install_package() {
    local extra=$1 quiet=--quiet stamp done_with
    stamp=$venv/.installed-$extra
    done_with=$(cat -- "$checkout"/{pyproject.toml,constraints.txt} | sha256sum)
    if [[ -e $stamp && $(<"$stamp") == "$done_with" ]]; then
        say "what pyproject.toml and constraints.txt ask for is installed"
        return 0
    fi
    say "installing appliance[$extra] and what it needs; the first time takes a minute or more"
    [[ ! -t 2 ]] || quiet=''
    # Files by relative name: pip takes spaces in them for the end of a requirement.
    (cd -- "$checkout" && "$venv/bin/python" -m pip install ${quiet:+"$quiet"} --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extra]" >&2 </dev/null)
    printf '%s\n' "$done_with" >"$stamp"
}

say() {
    printf 'install.sh: %s\n' "$*" >&2
}

# die STATUS MESSAGE [HINT]
die() {
    say "$2"
    [[ -z ${3-} ]] || printf '  hint: %s\n' "$3" >&2
    exit "$1"
}

main "$@"
