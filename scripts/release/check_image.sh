#!/usr/bin/env bash
# Checks without a container engine that the image for processors needs only one static file. The binary runs as a
# router, a prefill and a decode worker in a root folder that has only the binary and /etc/hosts, read-only, as user
# 65532 without any capability, in a network namespace of its own; one request is then served.
# usage: check_image.sh BIN      BIN is built for a musl target. Needs root and unshare.
set -euo pipefail
binary=$(realpath "$1")
if [ "$(id -u)" != 0 ] || ! unshare --mount --net --pid --fork true 2>/dev/null; then
  echo "SKIPPED: namespaces of our own need root"
  exit 0
fi
if readelf --program-headers "$binary" | grep -q INTERP; then
  echo "FLAW: $binary asks for a loader: it is not static"
  exit 1
fi
root=$(mktemp -d)
chmod 755 "$root"
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{etc,proc,dev/shm,tmp,var/cache/cleave,usr/local/bin}
cp "$binary" "$root/usr/local/bin/cleave"
echo "127.0.0.1 router" > "$root/etc/hosts"

# All processes inside end with the first process of the namespace.
unshare --mount --net --pid --fork bash -euo pipefail -s "$root" <<'INSIDE'
root=$1
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
for folder in dev/shm var/cache/cleave; do mount -t tmpfs -o size=64m,uid=65532,gid=65532 tmpfs "$root/$folder"; done
mount -o remount,bind,ro "$root"
ip link set lo up
run() { setpriv --bounding-set=-all,+sys_chroot,+setuid,+setgid --no-new-privs -- \
  env -i XDG_CACHE_HOME=/var/cache/cleave "$(command -v chroot)" --userspec=65532:65532 "$root" /usr/local/bin/cleave "$@"; }
worker() { run worker --router=router:8000 --threads=1 --kv-cache=64MiB --drain-timeout=5 "$@"; }
run router --listen=0.0.0.0:8000 --drain-timeout=5 &
worker --leg=prefill --name=p0 --data-listen=0.0.0.0:7000 --data-advertise=127.0.0.1:7000 --metrics-listen=0.0.0.0:8001 &
worker --leg=decode --name=d0 --data-listen=0.0.0.0:7001 --data-advertise=127.0.0.1:7001 --metrics-listen=0.0.0.0:8002 &
asked() { run bench run --url=http://router:8000 --workload=short-short:input=8,output=4 --prompt=text --rate=1 --limit=1 --goal=1; }
for _ in $(seq 30); do
  if asked 2>/dev/null; then
    if touch "$root/usr/local/bin/new" 2>/dev/null; then echo "FLAW: the root is not read-only"; exit 1; fi
    echo "one static file of $(stat -c %s "$root/usr/local/bin/cleave") bytes, a read-only root and user 65532 are enough"
    exit 0
  fi
  sleep 1
done
echo "FLAW: no request was served in half a minute"
asked
INSIDE
