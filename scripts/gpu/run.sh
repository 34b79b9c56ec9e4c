#!/usr/bin/env bash
# Runs the checks that need a real GPU, in calls of ten minutes each, on a machine with a driver of CUDA 13.
# usage: run.sh --call first|roofline|system|again|experts|families [--only STAGE,…] [--budget SECONDS] [--out FOLDER]
#               [--scratch FOLDER] [--stand-in FOLDER]
#
#   first     correctness: smoke, tests, sanitizers, reference checkpoints, one timing of an engine
#   roofline  ceilings of the machine, labs by importance, hardware counters
#   system    the engine on 1B and 8B, legs by share, loading, peers by turns
#   again     the important stages once more after a correction: smoke, sanitizers, operations, engine, legs
#   families  every class of models in every number format, the lab of adapters, and the long tests of engines
#   experts   mixtures of experts: smoke, tests, reference checkpoints, their lab, an engine with 64 experts a layer
#
# Each call starts cold and needs nothing of another. It takes target/gpu-bundle, or its archive, which build.sh made on
# another machine. Stages run in the order of their value, each within a time limit of its own and the rest of the
# budget; none stops another, and one that hangs is killed (step.py). Findings are written at once, and the report is
# made anew after every stage, so an early end loses one stage. Needs Python 3; PyTorch and transformers for the peers.
# Changes no setting of the card.
# --only       these stages (see the end of this file), and facts.
# --budget     seconds for the whole call: 540 if absent.
# --out        the folder for report, table, records and log: $OUT, or target/gpu-run.
# --scratch    the folder for random weights (19 GB in the call `system`), which are kept: /tmp/cleave-gpu if absent.
# --stand-in   the folder of a libcuda.so.1 that runs kernels on the processor, to try this script out with small
#              shapes. A stage that needs a GPU runs too, and counts as skipped if it fails.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/scripts/gpu
call='' only='' budget=540 out=${OUT:-$root/target/gpu-run} scratch=/tmp/cleave-gpu stand_in=''
while [ $# -gt 0 ]; do
  case $1 in
    --call) call=$2 && shift ;;
    --only) only=$2 && shift ;;
    --budget) budget=$2 && shift ;;
    --out) out=$2 && shift ;;
    --scratch) scratch=$2 && shift ;;
    --stand-in) stand_in=$(cd "$2" && pwd) && shift ;;
    *) call=usage ;;
  esac
  shift
done
case $call in
  first | roofline | system | again | experts | families) ;;
  *) sed -n '2,23p' "$0" >&2; exit 2 ;;
esac

bundle=$root/target/gpu-bundle
cleave=$bundle/cleave
if [ ! -r "$bundle/manifest.json" ] && [ -r "$bundle.tar.xz" ]; then
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$bundle.tar.xz" "$root/target"
fi
if [ ! -r "$bundle/manifest.json" ]; then
  echo "run.sh: $bundle is not there; scripts/gpu/build.sh makes it" >&2
  exit 2
fi
chmod -f +x "$cleave" "$bundle/ceilings" "$bundle"/tests/* "$bundle"/labs/* "$bundle"/peers/* "$bundle"/tools/*
mkdir -p "$out" "$scratch"
log=$out/log.txt
export CLEAVE_GPU_RECORDS=$out/records.jsonl
: >"$log"
: >"$CLEAVE_GPU_RECORDS"
export PYTHONPATH=$here PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RUST_BACKTRACE=1
# Peers must not download anything, and their compiled kernels need not outlast the run.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
# Compiled kernels and other caches of programs stay out of the user's folders.
export XDG_CACHE_HOME=$scratch/cache
device=cuda
if [ -n "$stand_in" ]; then
  device=stand-in
  export LD_LIBRARY_PATH=$stand_in${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  # CUDA's libraries may be installed as a Python package only.
  libraries=$(python3 -c 'import nvidia, os; print(os.pathsep.join(p + "/cu13/lib" for p in nvidia.__path__ if os.path.isdir(p + "/cu13/lib")))' 2>/dev/null)
  [ -z "$libraries" ] || export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# Tests at once: each has a process, a context on the card and a few GiB of host memory.
jobs=$(($(nproc) / 2))
[ "$jobs" -ge 4 ] || jobs=4

note() { python3 "$here/record.py" "$@"; }
left() { echo $((budget - SECONDS)); }
report() { python3 "$here/report.py" --records "$CLEAVE_GPU_RECORDS" --out "$out" >"$out/table.md" 2>>"$log"; }

# Whether a stage is wanted: one of --only if that was given, else one of this call.
wanted() {
  if [ -n "$only" ]; then [[ ,facts,$only, == *",$1,"* ]]; else [[ " ${stages[$call]} " == *" $1 "* ]]; fi
}

# The last line of the log after line number $1.
last_line() { tail -n +$(($1 + 1)) "$log" | grep -v '^$' | tail -n 1 | cut -c1-160; }

# stage NAME LIMIT COMMAND…: runs the command within its limit, and records the outcome. A name that ends in + marks a
# stage that needs a GPU: with a stand-in its failure counts as skipped.
stage() {
  local name=${1%+} needs_gpu=no limit=$2 began=$SECONDS status why='' from
  [ "$name" = "$1" ] || needs_gpu=yes
  shift 2
  wanted "$name" || return 0
  if [ "$(left)" -lt 8 ]; then
    note stage name="$name" status=skipped why="no time was left" seconds=0
    echo "-- $name: no time was left"
    return 0
  fi
  [ "$limit" -le "$(left)" ] || limit=$(left)
  printf '\n=== %s (at %s s, for %s s)\n' "$name" "$SECONDS" "$limit" >>"$log"
  from=$(wc -l <"$log")
  python3 "$here/step.py" --limit "$limit" -- "$@" >>"$log" 2>&1
  case $? in
    0) status=ok ;;
    75) status=skipped why=$(last_line "$from") ;;
    124 | 137) status="timed out" ;;
    *) status=failed ;;
  esac
  if [ "$status" != ok ] && [ "$needs_gpu" = yes ] && [ -n "$stand_in" ]; then
    why="needs a GPU ($status with the stand-in): $(last_line "$from")"
    status=skipped
  fi
  note stage name="$name" status="$status" seconds=$((SECONDS - began)) ${why:+why="$why"}
  printf -- '-- %-16s %-10s %4s s %s\n' "$name" "$status" $((SECONDS - began)) "$why"
  [ "$status" = ok ] || [ "$status" = skipped ] || tail -n 12 "$log" | cut -c1-300 | sed 's/^/     /'
  report
}

# Stages of each call, for `wanted`; their order is that of the lines below.
declare -A stages=(
  [first]="facts smoke tests memcheck racecheck synccheck goldens first-engine"
  [roofline]="facts ceilings matmul labs counters"
  [system]="facts ceilings matmul engine-1b int4-1b legs engine-8b fast-8b loop-8b batching-8b llama-cpp load"
  [again]="facts smoke ceilings matmul operations engine-8b legs memcheck racecheck"
  [experts]="facts smoke ceilings matmul experts-tests experts-lab engine-experts goldens racecheck"
  [families]="facts adapters-lab tests families"
)
# Tests of properties that an emulator cannot show; the first of them runs every kernel once.
smoke="every_kernel_module_loads every_kernel_runs_on_small_sizes every_e4m3_code_is_read wgmma_sums_are_compared both_partitions_of_a_gpu a_child_process_writes_into"
# Tests that run under sanitizers: small ones, which together run every kernel.
watched="every_kernel_runs_on_small_sizes every_e4m3_code_is_read both_partitions_of_a_gpu matrix_products_match_the_cpu attention_matches_the_cpu device_draws_match reads_return_the_pools_bytes"
# Racecheck slows kernels down a hundred times and more: tests of small sizes, which together run every kernel.
raced="every_kernel_runs_on_small_sizes every_e4m3_code_is_read both_partitions_of_a_gpu quantised_matrix_products reads_return_the_pools_bytes"

# Random weights, written while other stages run. config.json comes last, so that a folder with one is whole.
declare -A shapes=([1b]=llama-3.2-1b [8b]=llama-3.1-8b [experts]=olmoe-1b-7b)
declare -A users=([1b]="first-engine engine-1b int4-1b legs llama-cpp load" [8b]="engine-8b fast-8b loop-8b batching-8b" [experts]="engine-experts")
kv_long=34GiB few=decode:1x1024,prefill:2048
of_8b=prefill:2048,decode:1x1024,decode:32x1024,decode:32x8192,prefill:8192,prefill:32768,decode:8x1024,decode:1x8192,decode:8x8192,prefill:512,decode:128x1024,decode:96x8192
fast_8b=prefill:2048,prefill:8192,prefill:32768
of_experts=decode:1x1024,decode:32x1024,prefill:2048,decode:128x1024
by_turns=decode:1x1024,prefill:2048,decode:32x1024,decode:32x8192,prefill:8192,decode:8x8192
# Two systems at once: their weights and caches must fit into the card together.
memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2>/dev/null || echo 0)
if [ "$memory_mib" -lt 120000 ]; then kv_long=12GiB by_turns=${by_turns//decode:32x8192,/}; fi
legs=() size=() more=() goldens=() names=() test_limit=20
if [ -n "$stand_in" ]; then
  # One core walks every block of every kernel.
  shapes=([1b]=tiny-llama-64 [8b]=tiny-llama-64 [experts]=tiny-qwen3-moe)
  kv_long=4MiB few=decode:1x16,prefill:20 of_8b=$few fast_8b=prefill:20 by_turns=$few of_experts=$few
  legs=(--kv-cache 4MiB --prompts 1 --prompt-tokens 40 --new-tokens 4 --clients 1 --calibrate 0 --shares 0.4,none)
  size=(--tiny) more=(-- --kv-cache 4MiB --max-num-seqs 4 --max-num-batched-tokens 64)
  # A second of kernels on a GPU takes minutes on the processor.
  names=(row_operations_match_the_cpu writes_change_exactly rows_are_bit_equal) test_limit=100
  goldens=(--prompts 0 --lengths 5,65 --tokens 3 --limit 60)
fi
# Goldens of all classes in one test, and a test of attention, take minutes in a debug build.
long="cuda_bf16_answers_are_path cuda_f32_matches cuda_f32_experts given_up_windows attention_matches_the_cpu"
if [ "$call" = families ]; then
  test_limit=155
  read -ra names <<<"$long"
fi
if [ "$call" = experts ]; then
  goldens+=(--model glm4-moe,gpt-oss,granite4-moe,granitemoe,granitemoeshared,minimax-m2,mixtral,olmoe,qwen2-moe,qwen3-moe)
fi
writer=''
needed() {
  local user
  for user in ${users[$1]}; do
    if wanted "$user"; then return 0; fi
  done
  return 1
}
write_models() {
  local name
  for name in 1b 8b experts; do
    if needed "$name" && [ ! -e "$scratch/$name/config.json" ]; then
      rm -rf "${scratch:?}/$name"
      "$cleave" synth --shape "${shapes[$name]}" --out "$scratch/$name" || return
    fi
  done
}

# Waits until weights are written. This is no stage, since later stages may need other weights.
await_model() {
  local name=$1 began=$SECONDS
  needed "$name" || return 0
  until [ -e "$scratch/$name/config.json" ]; do
    if ! kill -0 "$writer" 2>/dev/null || [ "$(left)" -lt 8 ]; then
      note absent what="weights of ${shapes[$name]}" why="not written after $SECONDS s"
      return 0
    fi
    sleep 0.5
  done
  python3 "$here/model.py" "$scratch/$name" "${shapes[$name]}"
  printf -- '-- %-16s %-10s %4s s\n' "weights of $name" awaited $((SECONDS - began))
}
# The end of this script ends the process that writes weights.
trap '[ -z "$writer" ] || kill "$writer" 2>/dev/null' EXIT

bench=("$cleave" bench engine --device cuda --dtype bf16 --stdin --rounds 1)
turns=(python3 "$here/turns.py")
tests=(python3 "$here/kernel_tests.py" --bundle "$bundle" --root "$root" --device "$device")
# engine FOLDER NAME …: the command that times a model of the scratch folder; more arguments of engine.py.
engine() {
  local folder=$scratch/$1 name=$2
  shift 2
  echo python3 "$here/engine.py" --cleave "$cleave" --model "$folder" --name "$name" "$@"
}

stage facts 30 python3 "$here/facts.py" --manifest "$bundle/manifest.json"
if needed 1b || needed 8b || needed experts; then
  write_models >>"$log" 2>&1 &
  writer=$!
fi
# Stages of correctness. A hang costs 20 s: each test is a process with that limit.
# shellcheck disable=SC2086
stage smoke 110 "${tests[@]}" --jobs 1 --limit "$test_limit" $smoke
stage tests 160 "${tests[@]}" --jobs "$jobs" --limit "$test_limit" "${names[@]}"
# shellcheck disable=SC2086
stage memcheck+ 80 "${tests[@]}" --sanitizer memcheck --limit 40 --jobs "$jobs" $watched
# shellcheck disable=SC2086
stage racecheck+ 80 "${tests[@]}" --sanitizer racecheck --limit 40 --jobs "$jobs" $raced
# shellcheck disable=SC2086
stage synccheck+ 60 "${tests[@]}" --sanitizer synccheck --limit 30 --jobs "$jobs" $watched
stage goldens 120 python3 "$here/goldens.py" --cleave "$cleave" --root "$root" --scratch "$scratch" "${goldens[@]}"
# Every class in every format, with all paths of a sequence; and the products of adapters.
stage families+ 340 python3 "$root/scripts/lab/families/measure.py" --run h100 --prompts 2 --program "$bundle/families" \
  --jobs "$(nproc)" --out "$out/families.json"
stage adapters-lab+ 40 python3 "$here/labs.py" --bundle "$bundle" --only "$bundle/labs/adapt"
await_model 1b
# shellcheck disable=SC2046
stage first-engine 40 $(engine 1b "${shapes[1b]}" --rounds 1 --shapes "$few") "${more[@]}"

# Stages of experts: operations, the lab of their kernels, and a model with 64 experts in each layer.
stage experts-tests 90 "${tests[@]}" --jobs "$jobs" --limit "$test_limit" experts
stage experts-lab+ 90 python3 "$here/labs.py" --bundle "$bundle" --only "$bundle/labs/experts"
await_model experts
# shellcheck disable=SC2046
stage engine-experts 110 $(engine experts "${shapes[experts]}" --shapes "$of_experts") "${more[@]}"

# Stages of ceilings: those of the machine, and the share of them that kernels reach.
stage ceilings+ 60 python3 "$here/labs.py" --bundle "$bundle" --only "$bundle/ceilings"
stage matmul+ 60 python3 "$here/ceilings.py"
stage operations 80 python3 "$here/labs.py" --bundle "$bundle" --only "$bundle/labs/operations" "${size[@]}"
stage labs+ 220 python3 "$here/labs.py" --bundle "$bundle" --limit 45 "${size[@]}"
stage counters+ 200 python3 "$here/counters.py" --bundle "$bundle" "${size[@]}"

# Stages of the whole system: the engine, legs by share, and peers by turns.
# shellcheck disable=SC2046
stage engine-1b 60 $(engine 1b "${shapes[1b]}") "${more[@]}"
stage int4-1b 60 bash -c "'$cleave' synth --model '$scratch/1b' --quantization awq --group-size 128 --out '$scratch/1b-int4' \
  && python3 '$here/model.py' '$scratch/1b-int4' '${shapes[1b]}-int4' --weight-bits 4.25 \
  && $(engine 1b-int4 "${shapes[1b]}-int4" --shapes "$few") ${more[*]}"
stage legs 100 python3 "$here/legs.py" --cleave "$cleave" --model "$scratch/1b" --name "${shapes[1b]}" "${legs[@]}"
await_model 8b
# shellcheck disable=SC2046
stage engine-8b 110 $(engine 8b "${shapes[8b]}" --shapes "$of_8b") "${more[@]}"
# shellcheck disable=SC2046
stage fast-8b+ 40 $(engine 8b "${shapes[8b]}" --system cleave-cublaslt --shapes "$fast_8b") "${more[@]:---}" --gpu-matmul fast
stage loop-8b+ 100 "${turns[@]}" --model "$scratch/8b" --name "${shapes[8b]}" --budget 95 --shapes "$by_turns" \
  --system cleave "${bench[*]} --model $scratch/8b --kv-cache $kv_long" \
  --system torch-compile "python3 $here/peers/torch_loop.py --model $scratch/8b"
stage batching-8b+ 70 "${turns[@]}" --model "$scratch/8b" --name "${shapes[8b]}" --budget 65 --rounds 2 --shapes "$by_turns" \
  --system cleave "${bench[*]} --model $scratch/8b --kv-cache $kv_long" \
  --system transformers "python3 $here/peers/transformers_batching.py --model $scratch/8b --kv-bytes $((12 << 30))"
stage llama-cpp+ 45 python3 "$here/peers/llama_cpp.py" --bundle "$bundle" --model "$scratch/1b" --name "${shapes[1b]}"
stage load+ 40 bash -c "python3 '$here/disk.py' '$scratch/1b' && $(engine 1b "${shapes[1b]}" --shapes "${few%%,*}" --from disk) ${more[*]}"

report
cat "$out/table.md"
echo
echo "call $call: after $SECONDS s, in $out; scripts/gpu/report.py --collect takes the JSON into results/gpu, then --page"
