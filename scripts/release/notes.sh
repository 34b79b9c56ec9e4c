#!/usr/bin/env bash
# Prints the section of CHANGELOG.md about a version.
# usage: notes.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/../.."
awk -v version="${1:?"usage: notes.sh VERSION"}" '/^## / { found = index($2, version) == 1; next } found' CHANGELOG.md
