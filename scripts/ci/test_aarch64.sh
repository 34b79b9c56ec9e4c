#!/usr/bin/env bash
# Tests the operations of 64-bit Arm on any machine: builds most of cleave-cpu's tests for aarch64 and runs them in
# qemu, with processors that have all of NEON's extensions, the dot product alone, and none. Does not measure speed.
# usage: test_aarch64.sh [TEST ...]      names of tests; by default all of the kernels'
# Prints SKIPPED and exits with 77 if a tool that it needs cannot be installed.
# Takes some ten minutes. Needs qemu's user emulation (apt-get install qemu-user-static), Rust's target (rustup target
# add aarch64-unknown-linux-musl) and Python 3 with venv: pip fetches Zig's C compiler, for two dependencies with parts
# in C, into target/aarch64.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=aarch64-unknown-linux-musl
folder=$PWD/target/aarch64

skip() {
  echo "SKIPPED: $1"
  exit 77
}

emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || skip "there is no qemu-aarch64 to run the tests in"
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || skip "Rust has not the target $target"
compiler=$(scripts/install/zig.sh "$folder" aarch64-linux-musl) || skip "Zig's C compiler cannot be fetched"

export CC_aarch64_unknown_linux_musl=$compiler AR_aarch64_unknown_linux_musl=ar
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=$emulator
tests=(--target "$target" -p cleave-cpu -p cleave-cpu-kernels --lib --test all)
# Whole checkpoints take too long in an emulator. One test starts a shell that starts the test again, which no emulator
# sees; memory nodes are not emulated.
skipped=(--skip accuracy:: --skip conformance:: --skip packed:: --skip a_full_disk --skip memory_is_interleaved)
cargo test --no-run "${tests[@]}"
for processor in max,pauth-impdef=on neoverse-n1 cortex-a57; do
  echo "== $processor"
  QEMU_CPU=$processor cargo test --quiet "${tests[@]}" -- "${skipped[@]}" "$@"
done
