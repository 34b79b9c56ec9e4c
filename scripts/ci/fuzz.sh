#!/usr/bin/env bash
# Runs libFuzzer on each parser of outside bytes, from the samples that the tests have.
# usage: fuzz.sh [SECONDS] [TARGET ...]      600 seconds, every target
# Needs cargo-fuzz (cargo install cargo-fuzz --version 0.13.2 --locked) and a C++ compiler; stable Rust is enough, since
# no sanitizer is used: the fuzzed code has no unsafe parts, and its arithmetic is checked. The corpus grows in
# target/fuzz/corpus. Inputs on which a target failed are in tests/fuzz/artifacts: fix the bug, and keep the input as
# tests/fuzz/seeds/TARGET/NAME, which every run of the tests gives to the parser from then on.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-600}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(http chat completions messages responses tokenize
  text template calls grammar checkpoint frames policy grpc kubernetes trace)
corpus=$PWD/target/fuzz/corpus

echo "== samples"
CLEAVE_FUZZ_CORPUS=$corpus cargo test --quiet --lib -p cleave-api -p cleave-bench -p cleave-checkpoint -p cleave-fleet \
  -p cleave-grammar -p cleave-kubernetes -p cleave-policy -p cleave-text -p cleave-transfer -- damaged any_text > /dev/null

failed=()
for target in "${targets[@]}"; do
  echo "== $target"
  mkdir -p "$corpus/$target"
  log=$corpus/$target.log
  if CARGO_TARGET_DIR=$PWD/target/fuzz cargo fuzz run --fuzz-dir tests/fuzz --sanitizer none "$target" "$corpus/$target" -- \
    -max_total_time="$seconds" -timeout=20 -max_len=65536 -print_final_stats=1 > "$log" 2>&1; then
    # A row of the table in docs/benchmarks/fuzzing.md.
    awk -v name="$target" '/stat::number_of_executed_units/ { runs = $2 } /stat::new_units_added/ { news = $2 }
      END { printf "| `%s` | %d | %d |\n", name, runs, news }' "$log"
  else
    failed+=("$target")
    tail -30 "$log"
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "found something: ${failed[*]}"; exit 1; }
