#!/usr/bin/env bash
# Installs mistral.rs (its Python package, for processors) from the Python registry.
# usage: install_mistralrs.sh FOLDER      leaves FOLDER/bin/python
# Needs Python 3.10 or later with venv.
set -euo pipefail
version=0.9.5
[ -d "$1" ] || python3 -m venv "$1"
"$1/bin/pip" install --quiet --disable-pip-version-check "mistralrs==$version"
"$1/bin/python" -c "import mistralrs; print('mistralrs $version')"
