#!/usr/bin/env bash
# Installs the headers of FlashInfer from its Python package, without compiling or importing any of it.
# usage: install_flashinfer.sh FOLDER      prints the folder that has include/ and cccl/
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
if [ ! -d "$folder/flashinfer/data/include" ]; then
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" flashinfer-python==0.6.18.post1
  python3 -m zipfile -e "$folder"/flashinfer_python-*.whl "$folder"
fi
echo "$folder/flashinfer/data"
