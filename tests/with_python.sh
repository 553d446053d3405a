#!/bin/sh
# Run a command in this checkout, on a machine that has a Python: this one, or else a Debian 13 in .debian-13.
#   sh tests/with_python.sh python3.13 make setup PYTHON=python3.13 VENV=.venv-python3.13
# Debian 13 has python3.13. It is made by debootstrap, entered by chroot, and takes 0.8 GB.
set -eu
wanted=$1
shift
if "$wanted" -c "" 2> /dev/null; then
    exec "$@"
fi
if [ "$wanted" != python3.13 ]; then
    echo "PYTHON: got '$wanted', which does not start, expected a Python of this machine, or python3.13" >&2
    exit 2
fi
if [ "$(id -u)" != 0 ] || ! command -v debootstrap > /dev/null; then
    echo "PYTHON: got 'python3.13', which does not start, expected it, or root and debootstrap to install it" >&2
    exit 2
fi
root=$PWD/.debian-13
if [ ! -e "$root/.ready" ]; then
    debootstrap --variant=minbase --include=python3-venv,python3-dev,g++,git,make,ca-certificates,libnuma1 \
        trixie "$root" > "$root.log" 2>&1 || { echo "debootstrap failed: see $root.log" >&2; exit 1; }
    mkdir -p "$root$PWD"
    touch "$root/.ready"
fi
# The network and its certificates are this machine's. Mounts end with the command.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
# shellcheck disable=SC2016  # for the inner shell
exec unshare --mount sh -c '
    set -eu
    root=$1 here=$2
    shift 2
    mount --bind "$here" "$root$here"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    exec chroot "$root" /usr/bin/env HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin \
        sh -c "cd \"\$0\" && exec \"\$@\"" "$here" "$@"
' sh "$root" "$PWD" "$@"
