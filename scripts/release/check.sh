#!/usr/bin/env bash
# Installs each file of a release into an empty root and asks what it installed for an answer.
# usage: check.sh FOLDER        what package.py wrote
#
# archive   unpacked in an empty root, run in namespaces of its own, without a network
# wheel     pip install without a registry in a new environment; a model by name from a hub on loopback
# deb       dpkg --install into an empty root; units by systemd-analyze; run as the unit would
# image     the OCI archive's layer unpacked, its digests compared, its entry point run in namespaces as its user
# chart     its digest and its names
# Needs Python 3 with venv, unshare (util-linux) and the right to make namespaces; dpkg and systemd-analyze for two of
# them. Prints SKIPPED for a check whose tool is absent. Prints the seconds from each installation to the first answer.
set -euo pipefail
# A release without a static build has no image.
shopt -s nullglob
here=$(cd "$(dirname "$0")" && pwd)
files=$(cd "${1:?"usage: check.sh FOLDER"}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
machine=$(uname -m)

(cd "$files" && sha256sum --quiet --check SHA256SUMS)
echo "ok: checksums"

# Asks the program at $2 below the root $1 for an answer and says how long it took: a static one in namespaces without
# a network, where nothing but that root is there; another one needs this machine's C library.
ask() {
  local root=$1 program=$2 began
  began=$(date +%s.%N)
  if grep -qa ld-linux "$root/$program"; then
    python3 "$here/first_answer.py" / "$root/$program"
  else
    unshare --mount --pid --net --ipc --fork --kill-child python3 "$here/first_answer.py" "$root" "$program"
  fi
  python3 -c 'import sys, time; print(f"    first answer after {time.time() - float(sys.argv[1]):.1f} s")' "$began"
}

# A build for glibc asks for no function that came after 2.28, and has its kernels inside.
check_gnu() {
  local program=$1 newest
  newest=$(grep -aoE 'GLIBC_2\.[0-9]+' "$program" | sort -uV | tail -n 1)
  if [ "$(printf '%s\n' "$newest" GLIBC_2.28 | sort -V | tail -n 1)" != GLIBC_2.28 ]; then
    echo "FLAW: $program needs $newest: link it by build.sh" >&2
    exit 1
  fi
  "$program" --version > "$work/version"
  if ! grep -q "built-in kernels" "$work/version"; then
    echo "FLAW: $program has no kernels inside" >&2
    exit 1
  fi
}

for archive in "$files"/cleave-*-"$machine"-*.tar.gz; do
  root=$work/$(basename "$archive" .tar.gz)
  mkdir -p "$root"
  tar -xzf "$archive" -C "$root" --strip-components=1
  if [[ $archive == *-gnu.tar.gz ]]; then check_gnu "$root/bin/cleave"; fi
  ask "$root" bin/cleave
  echo "ok: $(basename "$archive")"
done

for wheel in "$files"/cleave-*"$machine"*.whl; do
  rm -rf "$work/venv"
  python3 -m venv "$work/venv"
  began=$(date +%s.%N)
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel"
  "$work/venv/bin/cleave" --version > "$work/version"
  grep -q "^cleave " "$work/version"
  python3 "$here/first_answer.py" / "$work/venv/bin/cleave"
  python3 -c 'import sys, time; print(f"    pip install and first answer: {time.time() - float(sys.argv[1]):.1f} s")' "$began"
  began=$(date +%s.%N)
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-index --force-reinstall "$wheel"
  python3 "$here/first_answer.py" / "$work/venv/bin/cleave" "$here/../../testdata/llama3"
  python3 -c 'import sys, time; print(f"    pip install, a model from a hub on loopback, first answer: {time.time() - float(sys.argv[1]):.1f} s")' "$began"
  "$work/venv/bin/pip" uninstall --quiet --yes cleave
  [ ! -e "$work/venv/bin/cleave" ]
  echo "ok: $(basename "$wheel")"
done

if command -v dpkg > /dev/null; then
  for package in "$files"/cleave_*_"$(dpkg --print-architecture)".deb; do
    root=$work/debian
    mkdir -p "$root/var/lib/dpkg"/{info,updates,triggers}
    touch "$root/var/lib/dpkg"/{status,available}
    dpkg --root="$root" --force-script-chrootless --force-depends --no-triggers --install "$package" > "$work/dpkg.log" 2>&1 ||
      { cat "$work/dpkg.log"; exit 1; }
    dpkg --root="$root" --verify cleave
    ask "$root" usr/bin/cleave
    for command in serve router; do
      "$root/usr/bin/cleave" config check "$root/etc/cleave/$command.yaml" --for "$command"
    done
    for leg in prefill decode; do
      "$root/usr/bin/cleave" config check "$root/etc/cleave/worker-$leg.yaml" --for worker
    done
    dpkg --root="$root" --force-script-chrootless --purge cleave >> "$work/dpkg.log" 2>&1 || { cat "$work/dpkg.log"; exit 1; }
    [ -z "$(find "$root" -name '*cleave*' -not -path '*/var/lib/dpkg/*')" ]
    echo "ok: $(basename "$package")"
  done
else
  echo "SKIPPED: dpkg is not installed"
fi

if command -v systemd-analyze > /dev/null; then
  mkdir -p "$work/units"
  for unit in "$here"/systemd/*.service; do
    # The program is not installed on this machine; any that is stands for it.
    sed 's|/usr/bin/cleave|/bin/true|' "$unit" > "$work/units/$(basename "${unit/@/@decode}")"
  done
  systemd-analyze verify --man=no "$work/units"/*.service
  echo "ok: units of systemd"
else
  echo "SKIPPED: systemd-analyze is not installed"
fi

for image in "$files"/cleave-*-image.tar; do
  root=$work/image
  python3 "$here/unpack_image.py" "$image" "$machine" "$root"
  ask "$root" usr/local/bin/cleave
  echo "ok: $(basename "$image")"
done
for chart in "$files"/cleave-chart-*-oci.tar; do
  python3 "$here/unpack_image.py" "$chart" - "$work/chart"
  [ -e "$work/chart/cleave/Chart.yaml" ]
  echo "ok: $(basename "$chart")"
done
python3 -c 'import json, sys; bill = json.load(open(sys.argv[1])); assert len(bill["components"]) > 100' "$files"/*.cdx.json
echo "ok: bill of materials"
