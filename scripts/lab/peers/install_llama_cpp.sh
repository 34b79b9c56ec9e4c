#!/usr/bin/env bash
# Builds llama.cpp from the source that the llama-cpp-python package carries.
# usage: install_llama_cpp.sh FOLDER
#        Leaves FOLDER/llama-{bench,batched-bench,server,quantize} and FOLDER/venv (with gguf).
# JOBS=N builds with N compilers (all cores if unset); 210 files, about 12 minutes of one core.
# Needs a C++ compiler, Python 3 with venv, and the Python registry.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
version=0.3.36
programs=(llama-bench llama-batched-bench llama-server llama-quantize)
cd "$folder"
[ -d venv ] || python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check scikit-build-core cmake ninja gguf numpy
if [ ! -x llama-quantize ]; then
  [ -d "llama_cpp_python-$version" ] || {
    venv/bin/pip download --quiet --no-deps --no-build-isolation --no-binary :all: "llama-cpp-python==$version"
    tar xzf "llama_cpp_python-$version.tar.gz"
  }
  # The server is built without its web page, which would be downloaded; all else is as upstream builds it.
  PATH="$folder/venv/bin:$PATH" cmake -G Ninja -S "llama_cpp_python-$version/vendor/llama.cpp" -B build \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  PATH="$folder/venv/bin:$PATH" ninja -C build -j "${JOBS:-$(nproc)}" "${programs[@]}"
  cp "${programs[@]/#/build/bin/}" .
fi
echo "$folder/llama-server"
