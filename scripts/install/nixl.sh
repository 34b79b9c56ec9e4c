#!/usr/bin/env bash
# Gets NVIDIA's transfer library and its plugins from the Python registry: no GPU, no root, 60 MB (200 unpacked).
# usage: nixl.sh FOLDER      unpacks the wheel there; prints the library's path, for --nixl-library
# Needs Python 3 with venv.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
wheel="nixl-cu13==1.5.1"
library="$folder/wheel/.nixl_cu13.mesonpy.libs/libnixl_capi.so"
if [ ! -f "$library" ]; then
  [ -d "$folder/venv" ] || python3 -m venv "$folder/venv"
  # The wheel is for one release of Python, but the library inside depends on none.
  "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version 3.12 --dest "$folder" "$wheel"
  rm -rf "$folder/wheel.part" "$folder/wheel"
  "$folder/venv/bin/python" -m zipfile -e "$folder"/nixl_cu13-*.whl "$folder/wheel.part"
  mv "$folder/wheel.part" "$folder/wheel"
fi
echo "$library"
