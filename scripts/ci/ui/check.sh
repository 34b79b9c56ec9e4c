#!/usr/bin/env bash
# Tests the pages: the chat's state by Node.js alone, then fleet and chat in a real browser: `check.sh [flags of
# check.mjs]`. The browser's part needs Chromium (CHROMIUM=PATH, or an installed one: Debian's package `chromium` with
# `fonts-dejavu-core`) and two npm packages, which go to target/ui-check. Prints SKIPPED without one of them. The
# program is CLEAVE=PATH, or built.
#
# The pictures of docs are made by: check.sh --shots docs
set -euo pipefail
cd "$(dirname "$0")/../../.."
skip() { echo "SKIPPED: $1"; exit 0; }

command -v node >/dev/null && command -v npm >/dev/null || skip "there is no Node.js"
node --test scripts/ci/ui/conversation.test.mjs scripts/ci/ui/events.test.mjs

browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
[ -n "$browser" ] || skip "there is no Chromium (apt-get install chromium fonts-dejavu-core)"

modules=${CARGO_TARGET_DIR:-target}/ui-check
mkdir -p "$modules"
if ! [ -d "$modules/node_modules/axe-core" ]; then
  echo '{"private": true}' > "$modules/package.json"
  (cd "$modules" && npm install --no-fund --no-audit --save-exact playwright-core@1.65.1 axe-core@4.14.1 >install.log 2>&1) \
    || skip "playwright-core and axe-core could not be had from npm ($modules/install.log)"
fi
if [ -z "${CLEAVE:-}" ]; then
  cargo build -q -p cleave-cli
  CLEAVE=${CARGO_TARGET_DIR:-target}/debug/cleave
fi
exec node scripts/ci/ui/check.mjs --cleave "$CLEAVE" --browser "$browser" --modules "$modules" "$@"
