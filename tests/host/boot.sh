#!/bin/sh
# Boot a root file system that is not written to: boot.sh CGROUP ROOT SCRATCH NSPAWN_OPTION...
#
# Everything it mounts is in a mount namespace, everything it starts in a PID namespace: when this process is killed,
# the kernel ends the one and the other, and the memory that held the changes is free again.
set -eu

case $1 in
--inside)
    root=$2 scratch=$3
    shift 3
    mount -t tmpfs -o mode=0755 scratch "$scratch"
    mkdir "$scratch/changes" "$scratch/work" "$scratch/root" "$scratch/containers"
    # A relative lower directory: its name may have a colon, which would end it.
    cd -- "$root"
    mount -t overlay -o "lowerdir=.,upperdir=$scratch/changes,workdir=$scratch/work" overlay "$scratch/root"
    cd /
    # An overlay cannot lie on an overlay: Podman would copy a whole image for each container.
    mkdir -p "$scratch/root/var/lib/containers"
    # nspawn leaves directories there when it is killed.
    mkdir -p /run/systemd/nspawn
    mount -t tmpfs -o mode=0755 nspawn /run/systemd/nspawn
    export SYSTEMD_NSPAWN_API_VFS_WRITABLE=1 SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
    # At a reboot, nspawn with --keep-unit asks with this status to be started again.
    status=133
    while [ "$status" -eq 133 ]; do
        status=0
        systemd-nspawn --quiet --register=no --keep-unit --link-journal=no --capability=all \
            --system-call-filter='@keyring bpf' --notify-ready=yes --directory="$scratch/root" \
            --bind="$scratch/containers:/var/lib/containers" "$@" --boot || status=$?
    done
    exit "$status"
    ;;
*)
    cgroup=$1
    shift
    # Each host in a control group of its own: two systemds in one would take each other's services for their own.
    echo $$ >"$cgroup/cgroup.procs"
    exec unshare --mount --propagation private --pid --fork --kill-child=KILL --mount-proc "$0" --inside "$@"
    ;;
esac
