#!/usr/bin/env bash
# Installs the tools of scripts/ci/plane/check.py besides the control plane: Helm's engine (as scripts/ci/helm does),
# and gRPC for the calls of KEDA.
# usage: install_tools.sh FOLDER      leaves a virtual environment in FOLDER; prints its Python
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/../helm/install_tools.sh" "$1")
if [ ! -e "$1/grpc" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check grpcio==1.85.1 grpcio-tools==1.85.1 >&2
  touch "$1/grpc"
fi
echo "$python"
