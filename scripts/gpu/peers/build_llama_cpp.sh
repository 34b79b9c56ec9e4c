#!/usr/bin/env bash
# Builds llama.cpp's llama-bench for Hopper, on a machine without a GPU: most of an hour of one core.
# usage: build_llama_cpp.sh FOLDER      leaves FOLDER/llama-bench, and FOLDER/python for writing GGUF files
# The source comes with the Python package llama-cpp-python; nvcc is CLEAVE_NVCC, or installed into FOLDER/nvcc.
# Needs a C++ compiler and Python 3 with venv. CUDA's libraries are linked by name and must be on the machine of the
# run.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../../.." && pwd)
version=0.3.36
nvcc=${CLEAVE_NVCC:-$("$root/scripts/install/nvcc.sh" "$folder/nvcc")}

[ -d "$folder/venv" ] || python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scikit-build-core cmake ninja
# cuBLAS computes large products; the build only links against it.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps nvidia-cublas==13.1.0.3
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/python" --upgrade gguf
if [ ! -d "$folder/source" ]; then
  "$folder/venv/bin/pip" download --quiet --no-deps --no-build-isolation --no-binary :all: --dest "$folder" "llama-cpp-python==$version"
  mkdir -p "$folder/source"
  tar xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder/source" --strip-components=1
fi

# CMake expects one folder with all parts of CUDA.
# nvcc may be a link, and so may its folder.
home=$(cd -P "$(dirname "$(readlink -f "$nvcc")")/.." && pwd)
cublas=$("$folder/venv/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13
cuda=$folder/cuda
mkdir -p "$cuda/include" "$cuda/lib64"
ln -sfn "$home/bin" "$cuda/bin"
ln -sfn "$home/nvvm" "$cuda/nvvm"
for part in "$home" "$cublas"; do
  ln -sf "$part"/include/* "$cuda/include/"
  ln -sf "$part"/lib/* "$cuda/lib64/"
done
for library in "$cuda"/lib64/lib*.so.13; do
  ln -sfn "$(basename "$library")" "${library%.13}"
done
mkdir -p "$cuda/lib64/stubs"
# Only machines with a GPU have the driver's library: an empty one of its name is enough to link.
gcc -shared -Wl,-soname,libcuda.so.1 -o "$cuda/lib64/stubs/libcuda.so" -xc /dev/null

PATH=$folder/venv/bin:$cuda/bin:$PATH cmake -G Ninja -S "$folder/source/vendor/llama.cpp" -B "$folder/build" \
  -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DLLAMA_CURL=OFF -DBUILD_SHARED_LIBS=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DCMAKE_CUDA_ARCHITECTURES=90a-real \
  -DCMAKE_CUDA_FLAGS=--compress-mode=size -DCUDAToolkit_ROOT="$cuda" -DCMAKE_CUDA_COMPILER="$cuda/bin/nvcc" \
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined
PATH=$folder/venv/bin:$cuda/bin:$PATH cmake --build "$folder/build" --target llama-bench -j "${JOBS:-$(nproc)}"
cp "$folder/build/bin/llama-bench" "$folder/llama-bench"
