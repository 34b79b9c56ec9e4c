#!/usr/bin/env bash
# Installs NVIDIA's compiler and its binary tools from the Python registry: no GPU, no root, 300 MB.
# usage: nvcc.sh FOLDER      leaves FOLDER/bin/{nvcc,ptxas,cuobjdump,nvdisasm}; prints FOLDER/bin/nvcc
# Needs Python 3 with venv, and g++ when nvcc runs.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
# All parts must be of one release: the compiler's wheel requires the others without versions, and a mixture does not
# work. PTX of a later release would not load on drivers of CUDA 13.0. The binary tools have wheels only since 13.2.
parts="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96"
parts="$parts nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78"
if [ ! -x "$folder/bin/nvcc" ]; then
  [ -d "$folder/venv" ] || python3 -m venv "$folder/venv"
  # shellcheck disable=SC2086
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps $parts
  home=$("$folder/venv/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13
  ln -sfn "$home/bin" "$folder/bin"
  # nvcc looks for libraries in lib64.
  [ -e "$home/lib64" ] || ln -s lib "$home/lib64"
fi
echo "$folder/bin/nvcc"
