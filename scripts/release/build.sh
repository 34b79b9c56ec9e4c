#!/usr/bin/env bash
# Builds `cleave` for a target, on any Linux machine with Rust, Python 3 with venv and a C++ compiler.
# usage: build.sh TARGET [PROFILE]      prints the path of the binary, stripped
#
# TARGET   x86_64-unknown-linux-musl   static: processors only, any Linux
#          aarch64-unknown-linux-musl  the same for 64-bit Arm
#          x86_64-unknown-linux-gnu    for GPUs too, with every kernel inside: needs glibc 2.28 or later, because
#                                      NVIDIA's driver library is loaded at run time, which a static binary cannot do
# PROFILE  cargo's profile; dist (link-time optimisation) if absent
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${1:?"usage: build.sh TARGET [PROFILE]"}
profile=${2:-dist}
export CARGO_TERM_COLOR=never
out=${CARGO_TARGET_DIR:-target}
architecture=${target%%-*}
name=${target//-/_}

case $target in
  *-musl)
    compiler=$(scripts/install/zig.sh "$out/zig" "$architecture-linux-musl")
    # Rust's own linker, and an empty libdl: a part of libc here, but crates ask for it by name.
    static=$out/zig/static
    mkdir -p "$static"
    [ -e "$static/libdl.a" ] || ar rc "$static/libdl.a"
    host=$(rustc -vV | sed -n 's/^host: //p')
    printf '#!/bin/sh\nexec "%s" "$@" "-L%s"\n' \
      "$(rustc --print sysroot)/lib/rustlib/$host/bin/rust-lld" "$(realpath "$static")" > "$static/rust-lld"
    chmod +x "$static/rust-lld"
    linker=$(realpath "$static/rust-lld")
    export "CARGO_TARGET_${name^^}_LINKER=$linker"
    ;;
  x86_64-unknown-linux-gnu)
    compiler=$(scripts/install/zig.sh "$out/zig" "$architecture-linux-gnu.2.28")
    export "CARGO_TARGET_${name^^}_LINKER=$compiler"
    CLEAVE_NVCC=${CLEAVE_NVCC:-$(scripts/install/nvcc.sh "$out/nvcc")}
    export CLEAVE_NVCC CLEAVE_KERNELS=required
    ;;
  *)
    sed -n '2,11p' "$0" >&2
    exit 2
    ;;
esac
if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
  rustup target add "$target" >&2
fi
CLEAVE_COMMIT=$(git log -1 --format='%h (%cs)')
export CLEAVE_COMMIT "CC_$name=$compiler" "AR_$name=ar"
cargo build --locked --profile "$profile" --target "$target" -p cleave-cli --config "profile.$profile.strip=true" >&2
folder=$profile
[ "$profile" = dev ] && folder=debug
echo "$out/$target/$folder/cleave"
