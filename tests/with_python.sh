#!/bin/sh
# Run a command in this checkout, on a machine that has a Python: this one, or else Ubuntu 24.04 or Debian 13.
#   sh tests/with_python.sh python3.13 make setup PYTHON=python3.13 VENV=.venv-python3.13
# Ubuntu 24.04 has python3.12, Debian 13 has python3.13. debootstrap installs one in .ubuntu-24.04 or .debian-13, which
# takes 0.8 GB, and chroot enters it.
set -eu
wanted=$1
shift
if "$wanted" -c "" 2> /dev/null; then
    exec "$@"
fi
case $wanted in
    python3.12) system=ubuntu-24.04 suite=noble mirror=https://archive.ubuntu.com/ubuntu components=main,universe ;;
    python3.13) system=debian-13 suite=trixie mirror=https://deb.debian.org/debian components=main ;;
    *)
        echo "PYTHON: got '$wanted', which does not start, expected a Python of this machine, python3.12 or python3.13" >&2
        exit 2
        ;;
esac
if [ "$(id -u)" != 0 ] || ! command -v debootstrap > /dev/null; then
    echo "PYTHON: got '$wanted', which does not start, expected it, or root and debootstrap to install it" >&2
    exit 2
fi
root=$PWD/.$system
if [ ! -e "$root/.ready" ]; then
    # Every suite of Ubuntu is installed by the same script of debootstrap, also one that is newer than debootstrap.
    script=$([ -e "/usr/share/debootstrap/scripts/$suite" ] || echo gutsy)
    # shellcheck disable=SC2086  # no script is no word
    debootstrap --variant=minbase --components=$components \
        --include=python3-venv,python3-dev,g++,git,make,ca-certificates,libnuma1 \
        $suite "$root" $mirror $script > "$root.log" 2>&1 || { echo "debootstrap failed: see $root.log" >&2; exit 1; }
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
