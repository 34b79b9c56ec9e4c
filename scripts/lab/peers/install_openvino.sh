#!/usr/bin/env bash
# Installs OpenVINO GenAI from the Python registry.
# usage: install_openvino.sh FOLDER       leaves FOLDER/bin/python
# Needs Python 3.11 to 3.14 with venv.
set -euo pipefail
[ -d "$1" ] || python3 -m venv "$1"
"$1/bin/pip" install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
"$1/bin/python" -c "import openvino_genai; print('openvino-genai', openvino_genai.__version__)"
