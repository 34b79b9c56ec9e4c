#!/usr/bin/env bash
# Installs the tools that render and check the chart, from the Python registry: Helm's engine and Kubernetes' schemas.
# usage: install_tools.sh FOLDER      leaves a virtual environment in FOLDER; prints its Python
# Needs Python 3.10 or newer with venv; 200 MB.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
if [ ! -e "$folder/complete" ]; then
  [ -d "$folder/bin" ] || python3 -m venv "$folder"
  pip="$folder/bin/pip install --quiet --disable-pip-version-check"
  # Helm's engine is one built library, so its digest is checked and not only its name.
  printf '%s\n' 'helm-python-sdk==0.2.2 --hash=sha256:28cc13abaf134c3a7e37f070c939be8d9cdc9825c3c8b8b2d35161073bcd4578' \
    > "$folder/engine.txt"
  $pip --no-deps --require-hashes -r "$folder/engine.txt" >&2
  $pip kubernetes-validate==1.37.0 jsonschema==4.26.0 pyyaml==6.0.3 >&2
  touch "$folder/complete"
fi
echo "$folder/bin/python"
