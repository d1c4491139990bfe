#!/bin/bash
# make_root.sh OUT.tar.xz: the smallest root with a real systemd (Debian 13, systemd 257), for kill_matrix.py.
# Needs root, debootstrap and a Debian mirror. Everything that is not systemd comes from the host at run time.
set -euo pipefail
out=$(realpath -m -- "$1")
root=$(mktemp -d)
trap 'rm -rf -- "$root"' EXIT

debootstrap --variant=minbase --include=systemd trixie "$root" ${2:+"$2"} >&2

cd "$root"
mkdir -p host
# Nothing here installs or translates anything any more.
rm -rf usr/share/{doc,man,info,locale,i18n,zoneinfo,lintian,bug,common-licenses,perl5,bash-completion,debconf,gcc,gdb}
rm -rf usr/lib/x86_64-linux-gnu/{gconv,perl-base,perl,security} usr/lib/{apt,dpkg,locale,udev/hwdb.d} usr/bin/perl* usr/bin/{apt,dpkg}*
rm -rf var/cache/* var/lib/{apt,dpkg} var/log/* usr/lib/systemd/{boot,catalog} usr/lib/x86_64-linux-gnu/libapt* boot/*
# The host's devices, names, networks and terminals are the host's business.
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket \
    systemd-networkd.service systemd-networkd.socket systemd-resolved.service systemd-timesyncd.service \
    systemd-logind.service systemd-modules-load.service systemd-sysctl.service getty@.service console-getty.service \
    systemd-remount-fs.service systemd-firstboot.service dev-hugepages.mount sys-kernel-debug.mount \
    sys-kernel-tracing.mount systemd-journal-flush.service; do
    ln -sf /dev/null "etc/systemd/system/$unit"
done
ln -sf /usr/lib/systemd/system/multi-user.target etc/systemd/system/default.target
: >etc/machine-id

tar --numeric-owner --sort=name -cf - . | xz -T0 -6 >"$out"
ls -l -- "$out" >&2
