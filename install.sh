#!/usr/bin/env bash
# Install on this host, or try this checkout, or test it. What is said goes to standard error: standard output is the
# demo's.
set -euo pipefail

checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=${APPLIANCE_VENV:-$checkout/.venv}
readonly checkout
readonly prefix=/opt/appliance unit_folder=/usr/local/lib/systemd/system
# Not where Quadlet looks: it would take the place of the native template.
readonly share=/usr/local/share/appliance quadlets=/etc/containers/systemd

readonly EX_USAGE=64 EX_UNAVAILABLE=69 EX_NOPERM=77
readonly NEWEST_MINOR=13 OLDEST_MINOR=11
readonly MOST_TEST_PROCESSES=4

# What the tests call, and the Debian package it comes in. numactl is for the library of it that vLLM links.
readonly TEST_PROGRAMS="
systemd-nspawn systemd-container
debootstrap debootstrap
strace strace
shellcheck shellcheck
git git
g++ g++
openssl openssl
numactl numactl
"

usage() {
    cat <<'USAGE'
Usage: sudo ./install.sh                  install on this host, or upgrade: environment, command, units, user
       sudo ./install.sh --uninstall      take that away, and drop-ins of the units; leave the user, /etc/appliance,
                                          /var/lib/appliance, Podman's images and volumes (appliance-cache-MODEL)
       ./install.sh --bundle ARCHIVE [IMAGE...]
                                          make one archive that installs as this checkout does, with no network
       ./install.sh --try [ARGUMENT...]    run the demo: a real model, on this machine, as you
       ./install.sh --test [ARGUMENT...]   run every test; arguments go to pytest
       ./install.sh --help

--try needs Linux, Python 3.11 to 3.13 and 6 GB of disk (see PIP_* below); no root, no systemd, no GPU. It installs into
.venv in this checkout and keeps the model below ~/.cache/appliance; delete both to be rid of it. ARGUMENTs go to
`appliance demo`: try --json.

--test run as root also installs the Debian packages that the tests use. Without root it says which tests are skipped.
Where the processor has AVX2 it makes a second environment beside the first, .venv-vllm, in which the tests run vLLM.

--bundle fetches every package into a tar ARCHIVE, with the container IMAGEs that Podman has here. Unpack it on the other
host and run the install.sh in it: it loads the images, too. That host needs the same Python and processor.

Installing needs Linux with systemd 252 or later (254 for all of it) and Python 3.11 to 3.13. Engines that run stay, and
so do weights; keepers are restarted on the new code, which does not touch what they hold. Another torch, transformers or
vLLM than before, though, means other weights: they are verified and loaded again, and engines end first where both have no
room.

Environment:
  DESTDIR         install below this folder instead, for images; nothing is started
  APPLIANCE_EXTRAS  which parts of pyproject.toml to install: engine, or engine,cuda where there is an NVIDIA driver. An
                  upgrade does not remember it: name the same again
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
    --uninstall) uninstall ;;
    --bundle) bundle "$@" ;;
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
    make_vllm_venv
    cd -- "$checkout"
    # All of it, in several processes, each with its share of the processors; tests/schedule.py says who takes what.
    [[ $# -gt 0 ]] || set -- "--numprocesses=$(test_processes)"
    say "running: python -m pytest $*"
    exec "$venv/bin/python" -m pytest "$@"
}

test_processes() {
    local processors
    processors=$(nproc)
    printf '%d\n' $((processors < MOST_TEST_PROCESSES ? processors : MOST_TEST_PROCESSES))
}

install_on_host() {
    require_linux
    require_root
    local dest=${DESTDIR-}
    local release
    release=$prefix/releases/$(date -u +%Y%m%d%H%M%S)
    [[ -n $dest ]] || require_systemd
    [[ -n $dest ]] || load_images
    say "making the environment $release"
    mkdir -p -- "$dest$prefix/releases"
    venv=$dest$release
    # A release that is not complete is nothing to go back to.
    trap 'rm -rf -- "$venv"' EXIT
    make_venv
    begin_with "$dest$prefix/current"
    install_release
    trap - EXIT
    # One rename: whoever starts now gets the old release or the new one, whole.
    ln -sfn -- "$release" "$dest$prefix/current.new"
    mv -T -- "$dest$prefix/current.new" "$dest$prefix/current"
    install_files "$dest"
    if [[ -n $dest ]]; then
        say "installed below $dest; on the host: systemd-sysusers, systemd-tmpfiles --create, appliance apply"
        return 0
    fi
    systemd-sysusers appliance.conf
    systemd-tmpfiles --create appliance.conf
    systemctl daemon-reload
    systemctl enable --quiet appliance.target
    # Their weights are with PID 1 meanwhile, and engines do not notice. Engines run on until somebody restarts them.
    systemctl try-restart 'weights@*.service'
    remove_old_releases "$release"
    say "installed. Next: edit /etc/appliance/appliance.yaml, put public keys into /etc/appliance/trust," \
        "then: appliance check && appliance apply && appliance doctor"
}

# begin_with RELEASE: an upgrade begins with links to the packages of the release before. What pip replaces it unlinks
# first, so that release stays as it was; the rest is neither fetched again nor twice on disk and in memory.
begin_with() {
    local own old
    own=$(echo "$venv"/lib/python3.*/site-packages)
    old=$1/${own#"$venv/"}
    [[ -d $old ]] || return 0
    if cp --archive --link -- "$old" "$own.linked"; then
        rm -rf -- "$own"
        mv -T -- "$own.linked" "$own"
        rm -rf -- "$own"/appliance{,-*}
    else
        rm -rf -- "$own.linked"
    fi
}

# The package as a wheel's copy, not this checkout: it may move or change after this.
install_release() {
    local extras quiet=--quiet
    extras=$(extras)
    say "installing appliance[$extras] and what it needs; this takes a minute or more"
    [[ ! -t 2 ]] || quiet=''
    if is_bundle; then
        "$venv/bin/python" -m pip install ${quiet:+"$quiet"} --disable-pip-version-check --no-index \
            --find-links "$checkout/wheels" --constraint "$checkout/constraints.txt" "appliance[$extras]" >&2 </dev/null
        return 0
    fi
    local source
    source=$(mktemp -d)
    copy_source "$source"
    (cd -- "$source" && "$venv/bin/python" -m pip install ${quiet:+"$quiet"} --disable-pip-version-check \
        --constraint constraints.txt ".[$extras]" >&2 </dev/null)
    rm -rf -- "$source"
}

# pip builds in place: a checkout that root wrote to would be of no use to its owner.
copy_source() {
    cp -R -- "$checkout"/{appliance,pyproject.toml,README.md,LICENSE,constraints.txt} "$1"
}

extras() {
    if [[ -n ${APPLIANCE_EXTRAS-} ]]; then
        printf '%s\n' "$APPLIANCE_EXTRAS"
    elif is_bundle; then
        cat -- "$checkout/wheels/extras"
    elif [[ -e /proc/driver/nvidia/version ]]; then
        printf 'engine,cuda\n'
    else
        printf 'engine\n'
    fi
}

is_bundle() {
    [[ -e $checkout/wheels/python ]]
}

bundle() {
    local archive=${1-} folder place image number=0
    [[ -n $archive ]] || die $EX_USAGE "--bundle needs the name of the archive to make" "./install.sh --bundle bundle.tar"
    is_bundle && die $EX_USAGE "this is a bundle already"
    shift
    require_linux
    for image in "$@"; do
        podman image exists "$image" || die $EX_UNAVAILABLE "there is no image $image to pack" \
            "podman images lists those that $(id -un) has; root's are others than an ordinary user's"
    done
    folder=$(mktemp -d)
    # shellcheck disable=SC2064 # it is gone when the trap runs
    trap "rm -rf -- '$folder'" EXIT
    place=$folder/appliance
    mkdir -p -- "$place"/{wheels,images} "$folder/source"
    cp -R -- "$checkout"/{container,etc,install.sh,units} "$place"
    copy_source "$place"
    find "$place" -name __pycache__ -prune -exec rm -rf -- {} +
    copy_source "$folder/source"
    venv=$folder/venv
    make_venv
    say "fetching the packages of appliance[$(extras)]"
    (cd -- "$folder/source" && "$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check \
        --constraint constraints.txt --wheel-dir "$place/wheels" ".[$(extras)]" >&2 </dev/null)
    extras >"$place/wheels/extras"
    "$venv/bin/python" -c 'import sys; print("3.%d" % sys.version_info[1])' >"$place/wheels/python"
    for image in "$@"; do
        say "saving the image $image"
        number=$((number + 1))
        podman save --quiet --output "$place/images/$number.tar" "$image"
    done
    # Wheels are compressed already.
    tar --create --owner=root --group=root --file "$archive" --directory "$folder" appliance
    say "made $archive: on the other host, tar --extract --file $(basename -- "$archive"), then sudo appliance/install.sh"
}

load_images() {
    local image
    for image in "$checkout"/images/*.tar; do
        [[ -e $image ]] || return 0
        command -v podman >/dev/null || die $EX_UNAVAILABLE "this bundle has container images, and there is no Podman here" \
            "install Podman, or remove $checkout/images"
        say "loading $image"
        podman load --quiet --input "$image" >&2
    done
}

install_files() {
    local dest=$1 unit
    for unit in "$checkout"/units/*.{service,path,timer,target}; do
        install -D -m 0644 -- "$unit" "$dest$unit_folder/$(basename -- "$unit")"
    done
    # Older ones would complain of it at every reload. An image is taken for a newer one.
    for unit in weights@.service engine@.service; do
        if [[ -n $dest || $(systemd_version) -ge 254 ]]; then
            install -D -m 0644 -- "$checkout/units/backoff.conf" "$dest$unit_folder/$unit.d/backoff.conf"
        fi
    done
    install -D -m 0644 -- "$checkout/container/engine@.container" "$dest$share/engine@.container"
    install -D -m 0644 -- "$checkout/units/appliance.sysusers.conf" "$dest/usr/local/lib/sysusers.d/appliance.conf"
    install -D -m 0644 -- "$checkout/units/appliance.tmpfiles.conf" "$dest/usr/local/lib/tmpfiles.d/appliance.conf"
    install -D -m 0644 -- "$checkout/etc/appliance.yaml" "$dest/etc/appliance/appliance.yaml.example"
    mkdir -p -- "$dest/etc/appliance/trust"
    if [[ -e $dest/etc/appliance/appliance.yaml ]]; then
        say "kept /etc/appliance/appliance.yaml; what is new in the example is in appliance.yaml.example beside it"
    else
        install -m 0644 -- "$checkout/etc/appliance.yaml" "$dest/etc/appliance/appliance.yaml"
    fi
    mkdir -p -- "$dest/usr/local/bin"
    printf '#!/bin/sh\nexec %s/current/bin/python -m appliance "$@"\n' "$prefix" >"$dest/usr/local/bin/appliance"
    chmod 0755 -- "$dest/usr/local/bin/appliance"
}

# What still runs from the release before this one may import from it: that one stays.
remove_old_releases() {
    local keep=$1 old
    for old in $(find "$prefix/releases" -mindepth 1 -maxdepth 1 -type d -not -path "$keep" | sort | head -n -1); do
        say "removing the old release $old"
        rm -rf -- "$old"
    done
}

uninstall() {
    require_root
    local dest=${DESTDIR-} unit
    if [[ -z $dest ]]; then
        say "stopping keepers and engines: what they hold is freed"
        systemctl stop appliance.target 'engine@*.service' 'weights@*.service' 'checkpoint@*' || true
        systemctl disable --quiet appliance.target || true
    fi
    for unit in "$checkout"/units/*.{service,path,timer,target}; do
        rm -f -- "$dest$unit_folder/$(basename -- "$unit")"
    done
    rm -rf -- "$dest$unit_folder"/{weights,engine}@.service.d
    rm -rf -- "$dest"/etc/systemd/system/{weights,engine,checkpoint}@*.{d,wants} "$dest/etc/systemd/system/appliance.target.wants"
    for unit in "$dest$quadlets"/engine@*.container; do
        if [[ $(readlink -- "$unit") == "$share/engine@.container" ]] || is_written_by_apply "$unit"; then
            rm -rf -- "$unit" "$unit.d"
        fi
    done
    rm -f -- "$dest/usr/local/lib/sysusers.d/appliance.conf" "$dest/usr/local/lib/tmpfiles.d/appliance.conf" \
        "$dest/usr/local/bin/appliance"
    rm -rf -- "$dest$prefix" "$dest$share" "$dest/var/lib/appliance-host" "$dest/var/cache/appliance"
    [[ -n $dest ]] || systemctl daemon-reload
    say "gone. Left: /etc/appliance (manifest, keys), /var/lib/appliance (pins, canaries), the user appliance, Podman's" \
        "images and its volumes appliance-cache-MODEL, and every checkpoint with its signature"
}

is_written_by_apply() {
    [[ -f $1 ]] && grep --quiet '^# Written by .appliance apply. from ' -- "$1"
}

require_root() {
    [[ $EUID -eq 0 || -n ${DESTDIR-} ]] || die $EX_NOPERM "installing on a host needs root" \
        "sudo ./install.sh, or ./install.sh --try without root"
}

require_systemd() {
    local version
    command -v systemctl >/dev/null || die $EX_UNAVAILABLE "no systemd here" "use ./install.sh --try, or appliance up"
    version=$(systemd_version)
    [[ $version -ge 252 ]] || die $EX_UNAVAILABLE "systemd $version is too old" "252 or later is needed"
    [[ -d /run/systemd/system ]] || die $EX_UNAVAILABLE "systemd is not PID 1 here" "use DESTDIR= to make an image"
    [[ $version -ge 254 ]] || say "systemd $version: see what \`appliance doctor\` says about it"
}

systemd_version() {
    systemctl --version | sed -n '1s/[^0-9]*\([0-9]*\).*/\1/p'
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
    local candidate found package lacking='' candidates=(python3 python3.{13,12,11})
    ! is_bundle || candidates=("python$(<"$checkout/wheels/python")")
    [[ -z ${PYTHON-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        found=$(command -v "$candidate") || continue
        if is_usable "$found" venv ensurepip; then
            printf '%s\n' "$found"
            return 0
        fi
        if is_usable "$found"; then
            lacking=${lacking:-$found}
        fi
    done
    if [[ -n $lacking ]]; then
        package=$("$lacking" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')
        die $EX_UNAVAILABLE "$lacking cannot make a virtual environment" "apt-get install $package"
    fi
    ! is_bundle || die $EX_UNAVAILABLE "no Python $(<"$checkout/wheels/python") here, which this bundle is for" \
        "make the bundle with this host's Python, on a host that has it"
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

# The tests run vLLM in an environment of its own: the one of the other tests, by links, and what vLLM pins over it. What
# pip replaces it unlinks first, so the other one stays as it is.
make_vllm_venv() {
    local place=$venv-vllm stamp=$venv-vllm/.installed done_with own
    done_with=$(cat -- "$checkout"/{pyproject.toml,constraints.txt,tests/vllm/requirements.txt} | sha256sum)
    if [[ -e $stamp && $(<"$stamp") == "$done_with" ]]; then
        say "using the virtual environment $place for vLLM"
        return 0
    fi
    if [[ $(uname -m) != x86_64 ]] || ! grep -q -w avx2 /proc/cpuinfo; then
        say "not installed: vLLM, which needs a processor with AVX2; the tests that run it cannot"
        return 0
    fi
    if [[ -e $place && ! -e $place/pyvenv.cfg ]]; then
        die $EX_USAGE "$place: exists and is not a virtual environment" "move it away, or set APPLIANCE_VENV"
    fi
    say "making the virtual environment $place and installing vLLM into it; the first time takes a minute or more"
    "$venv/bin/python" -m venv --clear --without-pip -- "$place" >&2
    own=$(echo "$place"/lib/python3.*/site-packages)
    rm -rf -- "$own"
    cp --archive --link -- "$venv/${own#"$place/"}" "$own"
    (cd -- "$checkout" && "$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --constraint constraints.txt --requirement tests/vllm/requirements.txt >&2 </dev/null)
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
