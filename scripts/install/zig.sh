#!/usr/bin/env bash
# Installs Zig's C compiler from the Python registry, to compile and link for other machines than this one.
# usage: zig.sh FOLDER TARGET      TARGET in Zig's words: x86_64-linux-musl, aarch64-linux-musl, x86_64-linux-gnu.2.28
# Prints the path of a compiler for TARGET. Needs Python 3 with venv.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
target=$2
compiler=$folder/cc-$target
if [ ! -x "$compiler" ]; then
  [ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check ziglang==0.13.0
  # Zig's names of targets differ from those that build scripts pass.
  cat > "$compiler" << EOF
#!/usr/bin/env bash
args=()
for arg in "\$@"; do [[ \$arg == --target=* ]] || args+=("\$arg"); done
exec "$folder/venv/bin/python" -m ziglang cc -target $target -fno-sanitize=undefined "\${args[@]}"
EOF
  chmod +x "$compiler"
fi
echo "$compiler"
