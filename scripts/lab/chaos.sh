#!/usr/bin/env bash
# Kills, stops, drains and cuts off workers of a real fleet under load, or changes their roles, and demands that
# every stream is byte for byte equal to that of an undisturbed run. Prints the first table of
# docs/benchmarks/faults.md.
#
# usage: chaos.sh [FAULTS] [SEED]     default 120 faults, a seed from the clock; the seed is printed, and
#                                     the same seed hits the same workers in the same order
# CLEAVE_CHAOS_CLIENTS sets the number of clients (default 16).
set -euo pipefail
cd "$(dirname "$0")/../.."
export CLEAVE_CHAOS_FAULTS=${1:-120} CLEAVE_CHAOS_SEED=${2:-$(date +%s)}
export CLEAVE_CHAOS_CLIENTS=${CLEAVE_CHAOS_CLIENTS:-16} RUST_LOG=${RUST_LOG:-info}
cargo test --quiet --release -p cleave-cli --test system chaos:: -- --nocapture
