#!/bin/bash
# boot_systemd.sh ROOT: boot a root of make_root.sh with systemd as PID 1 of namespaces of its own. Needs root.
# The host's files are at /host in it, with this systemd's /proc and /run, so that a unit can run the host's programs:
# `chroot /host PROGRAM`, whose notify socket and descriptor store are systemd's.
set -euo pipefail
root=$(realpath -- "$1")
export root
# shellcheck disable=SC2016  # these are expanded inside
exec unshare --pid --mount --uts --ipc --cgroup --fork sh -ec '
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mkdir -p "$root/host" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp"
    mount --rbind / "$root/host"
    mount -t proc proc "$root/proc"
    mount -t proc proc "$root/host/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    mkdir -p "$root/run/lock"
    mount --bind "$root/run" "$root/host/run"
    cd "$root"
    export container=unshare
    exec chroot "$root" /usr/lib/systemd/systemd --system --log-target=console --log-level=info
'
