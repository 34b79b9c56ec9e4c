#!/usr/bin/env bash
# Installs the OpenAI Python client into a folder of its own and runs a script against a server.
# usage: run.sh FOLDER BASE_URL [SCRIPT]    SCRIPT: client.py if absent
# Exit status 77: the client cannot be installed here (no Python, no network).
set -euo pipefail
folder=$1 url=$2 here=$(cd "$(dirname "$0")" && pwd)
if ! [ -x "$folder/bin/python" ] || ! "$folder/bin/python" -c 'import openai' 2>/dev/null; then
  python3 -m venv "$folder" || exit 77
  "$folder/bin/pip" install --quiet --disable-pip-version-check 'openai>=1.50' || exit 77
fi
exec "$folder/bin/python" "$here/${3:-client.py}" "$url"
