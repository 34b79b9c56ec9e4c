#!/usr/bin/env bash
# Builds the bundle that run.sh needs on a machine with a GPU, on a machine without one.
# usage: build.sh [--flashinfer] [--llama-cpp FOLDER] [--sanitizer] [--profile NAME]
#
# Leaves target/gpu-bundle, and its archive target/gpu-bundle.tar.xz: the binary with its kernels inside, the backend's
# test programs, the labs, a manifest; all stripped, for x86-64 and the glibc of this machine or a later one. nvcc is
# CLEAVE_NVCC, or installed into target/nvcc.
# --sanitizer packs compute-sanitizer from its Python package, for machines without one.
# --profile    cargo's profile of the binary and the labs: dist (link-time optimisation) if absent; dev builds sooner.
# --flashinfer also builds a measurement of FlashInfer's attention kernels, from the headers in their Python package.
# --llama-cpp packs the llama-bench that scripts/gpu/peers/build_llama_cpp.sh built in FOLDER.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
flashinfer=no llama_cpp='' sanitizer=no profile=dist
while [ $# -gt 0 ]; do
  case $1 in
    --flashinfer) flashinfer=yes ;;
    --llama-cpp) llama_cpp=$2; shift ;;
    --sanitizer) sanitizer=yes ;;
    --profile) profile=$2; shift ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
  esac
  shift
done

bundle=$root/target/gpu-bundle
nvcc=${CLEAVE_NVCC:-$("$root/scripts/install/nvcc.sh" "$root/target/nvcc")}
export CLEAVE_NVCC=$nvcc CLEAVE_KERNELS=required CARGO_TERM_COLOR=never
say() { printf '== %s (%ss)\n' "$1" "$SECONDS"; }

# Programs that cargo built, from its messages on standard input: `name path`, a line each.
executables() {
  python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        print(message["target"]["name"], message["executable"])
'
}

# Compiles a program that runs on the host and launches kernels: for Hopper, and as PTX for other cards.
compile() {
  local source=$1 out=$2
  shift 2
  "$nvcc" -std=c++17 -O3 -cudart static --compress-mode=size -gencode=arch=compute_90a,code=sm_90a \
    -I "$root/kernels/include" "$@" -o "$out" "$source"
  strip "$out"
}
others=("-gencode=arch=compute_80,code=compute_80" -Werror all-warnings)

rm -rf "$bundle"
mkdir -p "$bundle/tests" "$bundle/labs" "$bundle/peers" "$bundle/tools"

say "cleave"
cargo build --profile "$profile" -p cleave-cli --bin cleave --message-format=json | executables | while read -r name path; do
  [ "$name" != cleave ] || strip -o "$bundle/cleave" "$path"
done
[ -x "$bundle/cleave" ]

say "test programs"
cargo test --no-run -p cleave-cuda --message-format=json | executables | while read -r name path; do
  strip -o "$bundle/tests/$name" "$path"
done

say "families"
cargo build -p cleave-cuda --example families --message-format=json | executables | while read -r name path; do
  strip -o "$bundle/$name" "$path"
done

say "labs"
cargo bench --no-run --profile "$profile" -p cleave-cuda --bench operations --message-format=json | executables | while read -r name path; do
  strip -o "$bundle/labs/$name" "$path"
done
compile scripts/gpu/ceilings.cu "$bundle/ceilings" "${others[@]}"
for lab in kernels/*/lab.cu; do
  [ -e "$lab" ] || continue
  compile "$lab" "$bundle/labs/$(basename "$(dirname "$lab")")" "${others[@]}"
done

if [ "$flashinfer" = yes ]; then
  say "FlashInfer"
  headers=$("$root/scripts/gpu/peers/install_flashinfer.sh" "$root/target/flashinfer")
  compile scripts/gpu/peers/flashinfer.cu "$bundle/labs/flashinfer" \
    -isystem "$headers/cccl/libcudacxx/include" -isystem "$headers/cccl/cub" -isystem "$headers/cccl/thrust" -isystem "$headers/include"
fi
if [ -n "$llama_cpp" ]; then
  say "llama.cpp"
  strip -o "$bundle/peers/llama-bench" "$llama_cpp/llama-bench"
  cp -r "$llama_cpp/python" "$bundle/peers/python"
fi

if [ "$sanitizer" = yes ]; then
  say "compute-sanitizer"
  [ -d target/sanitizer ] || python3 -m venv target/sanitizer
  target/sanitizer/bin/pip install --quiet --disable-pip-version-check --no-deps nvidia-cuda-sanitizer-api==13.4.92
  mkdir -p "$bundle/tools"
  # The program looks for its libraries beside itself; those for 32 bits and the manual stay here.
  libraries=$(find target/sanitizer -name libsanitizer-collection.so -not -path '*/x86/*' | head -n 1)
  find "$(dirname "$libraries")" -maxdepth 1 -type f -exec cp {} "$bundle/tools/" \;
fi

say "manifest"
python3 - "$bundle" "$nvcc" <<'PYTHON'
import json, subprocess, sys
from pathlib import Path

bundle, nvcc = Path(sys.argv[1]), sys.argv[2]

def told(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

files = {str(path.relative_to(bundle)): path.stat().st_size for path in sorted(bundle.rglob("*")) if path.is_file()}
manifest = {
    "commit": told("git", "rev-parse", "HEAD"),
    "is_modified": bool(told("git", "status", "--porcelain", "--untracked-files=no")),
    "nvcc": told(nvcc, "--version").splitlines()[-1],
    "rustc": told("rustc", "--version"),
    "libc": told("ldd", "--version").splitlines()[0],
    "tests": [name for name in files if name.startswith("tests/")],
    "bytes": files,
}
(bundle / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
for name, size in files.items():
    print(f"{size / 2**20:8.2f} MiB  {name}")
tracked = sum(Path(name).stat().st_size for name in told("git", "ls-files").splitlines() if Path(name).is_file())
print(f"{sum(files.values()) / 2**20:8.2f} MiB  in all, beside {tracked / 2**20:.2f} MiB of tracked files")
PYTHON
say "archive"
python3 - "$bundle" <<'PYTHON'
import sys, tarfile

bundle = sys.argv[1]
with tarfile.open(f"{bundle}.tar.xz", "w:xz", preset=6) as archive:
    archive.add(bundle, "gpu-bundle")
PYTHON
bytes=$(stat -c %s "$bundle.tar.xz")
say "target/gpu-bundle.tar.xz, $bytes bytes"
# The archive is copied to the machine with the GPU for each call.
archive_bytes_max=45000000
if [ "$bytes" -gt "$archive_bytes_max" ]; then
  echo "build.sh: the archive has more than $archive_bytes_max bytes" >&2
  exit 1
fi
