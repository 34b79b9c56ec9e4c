#!/usr/bin/env bash
# Everything that a real GPU is needed for, in one command of ten minutes, on a machine with a driver of CUDA 13.
# usage: run.sh [--quick] [--only STAGE,…] [--budget SECONDS] [--out FOLDER] [--scratch FOLDER] [--stand-in FOLDER]
#
# Takes target/gpu-bundle, or the archive of it, which build.sh made elsewhere. Stages run in the order of what they are worth, each within a
# time of its own and what is left of the budget; none stops another. Findings are on disk as they come, and the report
# is made anew after every stage, so that whoever ends this early loses one stage. Needs Python 3; PyTorch and
# transformers for the ceiling of matrix products and for the peers. Changes no setting of the card.
# --quick      facts, ceilings, tests and reference checkpoints alone: two minutes.
# --only       these stages (see the end of this file), and facts.
# --budget     540 seconds if absent.
# --out        where report, table, records and log go: $OUT, or target/gpu-run.
# --scratch    where random weights are written, 19 GB: /tmp/cleave-gpu if absent. What is there is used again.
# --stand-in   the folder of a libcuda.so.1 that runs kernels on the processor: to try this script out.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/scripts/gpu
quick=no only='' budget=540 out=${OUT:-$root/target/gpu-run} scratch=/tmp/cleave-gpu stand_in=''
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=yes ;;
    --only) only=$2 && shift ;;
    --budget) budget=$2 && shift ;;
    --out) out=$2 && shift ;;
    --scratch) scratch=$2 && shift ;;
    --stand-in) stand_in=$(cd "$2" && pwd) && shift ;;
    *) sed -n '2,17p' "$0" >&2; exit 2 ;;
  esac
  shift
done

bundle=$root/target/gpu-bundle
cleave=$bundle/cleave
if [ ! -r "$bundle/manifest.json" ] && [ -r "$bundle.tar.xz" ]; then
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$bundle.tar.xz" "$root/target"
fi
if [ ! -r "$bundle/manifest.json" ]; then
  echo "run.sh: $bundle is not there; scripts/gpu/build.sh makes it" >&2
  exit 2
fi
chmod -f +x "$cleave" "$bundle/ceilings" "$bundle"/tests/* "$bundle"/labs/* "$bundle"/peers/*
mkdir -p "$out" "$scratch"
log=$out/log.txt
export CLEAVE_GPU_RECORDS=$out/records.jsonl
: >"$log"
: >"$CLEAVE_GPU_RECORDS"
export PYTHONPATH=$here PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RUST_BACKTRACE=1
# Peers must not look for anything outside, and what they compile need not outlast the run.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
device=cuda
if [ -n "$stand_in" ]; then
  device=stand-in
  export LD_LIBRARY_PATH=$stand_in${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  # CUDA's libraries may be there as a Python package only.
  libraries=$(python3 -c 'import nvidia, os; print(os.pathsep.join(p + "/cu13/lib" for p in nvidia.__path__ if os.path.isdir(p + "/cu13/lib")))' 2>/dev/null)
  [ -z "$libraries" ] || export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

note() { python3 "$here/record.py" "$@"; }
left() { echo $((budget - SECONDS)); }

# Whether a stage was asked for: KIND, which is `quick` if it belongs to --quick, and NAME.
wanted() {
  if [ -n "$only" ]; then [[ ,facts,$only, == *",$2,"* ]]; else [ "$quick" = no ] || [ "$1" = quick ]; fi
}

# stage KIND NAME LIMIT COMMAND…: runs it within its limit, and says how it went. KIND is `quick` or `long`.
stage() {
  local kind=$1 name=$2 limit=$3 began=$SECONDS status
  shift 3
  wanted "$kind" "$name" || return 0
  if [ "$(left)" -lt 8 ]; then
    note stage name="$name" status=skipped why="no time was left" seconds=0
    echo "-- $name: no time was left"
    return 0
  fi
  [ "$limit" -le "$(left)" ] || limit=$(left)
  printf '\n=== %s (at %s s, for %s s)\n' "$name" "$SECONDS" "$limit" >>"$log"
  timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1
  case $? in
    0) status=ok ;;
    124 | 137) status="timed out" ;;
    *) status=failed ;;
  esac
  note stage name="$name" status="$status" seconds=$((SECONDS - began))
  printf -- '-- %-16s %-10s %4s s\n' "$name" "$status" $((SECONDS - began))
  [ "$status" = ok ] || tail -n 12 "$log" | cut -c1-300 | sed 's/^/     /'
  report
}

report() { python3 "$here/report.py" --records "$CLEAVE_GPU_RECORDS" --out "$out" >"$out/table.md" 2>>"$log"; }

# Random weights, written while other stages run. config.json comes last, so that a folder with one is whole.
declare -A shapes=([1b]=llama-3.2-1b [8b]=llama-3.1-8b)
declare -A users=([1b]="engine-1b legs llama-cpp load" [8b]="engine-8b fast-8b loop-8b batching-8b")
writer=''
needed() {
  local user
  for user in ${users[$1]}; do
    if wanted long "$user"; then return 0; fi
  done
  return 1
}
write_models() {
  local name
  for name in 1b 8b; do
    if needed "$name" && [ ! -e "$scratch/$name/config.json" ]; then
      rm -rf "${scratch:?}/$name"
      "$cleave" synth --shape "${shapes[$name]}" --out "$scratch/$name" || return
    fi
  done
}

# Waits until weights are there. Not a stage: what comes after may need others.
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
# Whoever ends this run ends what it started.
trap '[ -z "$writer" ] || kill "$writer" 2>/dev/null' EXIT

bench=("$cleave" bench engine --device cuda --dtype bf16 --stdin --rounds 1)
turns=(python3 "$here/turns.py")

stage quick facts 30 python3 "$here/facts.py" --manifest "$bundle/manifest.json"
if [ -z "$stand_in" ]; then
  stage quick ceilings 60 python3 "$here/labs.py" --bundle "$bundle" --only "$bundle/ceilings"
fi
if [ -z "$stand_in" ] && { needed 1b || needed 8b; }; then
  write_models >>"$log" 2>&1 &
  writer=$!
fi
if [ -z "$stand_in" ]; then
  stage quick matmul 60 python3 "$here/ceilings.py"
fi
stage quick tests 150 python3 "$here/kernel_tests.py" --bundle "$bundle" --root "$root" --device "$device"
stage quick goldens 90 python3 "$here/goldens.py" --cleave "$cleave" --root "$root"
stage long labs 120 python3 "$here/labs.py" --bundle "$bundle"
await_model 1b
stage long engine-1b 60 python3 "$here/engine.py" --cleave "$cleave" --model "$scratch/1b" --name "${shapes[1b]}"
await_model 8b
stage long engine-8b 110 python3 "$here/engine.py" --cleave "$cleave" --model "$scratch/8b" --name "${shapes[8b]}" \
  --shapes prefill:2048,decode:1x1024,decode:32x1024,decode:32x8192,prefill:8192,decode:8x1024,decode:1x8192,decode:8x8192,prefill:512,prefill:32768,decode:128x1024,decode:96x8192,decode:128x8192
stage long fast-8b 40 python3 "$here/engine.py" --cleave "$cleave" --model "$scratch/8b" --name "${shapes[8b]}" --system cleave-cublaslt \
  --shapes prefill:2048,prefill:8192,prefill:32768 -- --gpu-matmul fast
stage long loop-8b 150 "${turns[@]}" --model "$scratch/8b" --name "${shapes[8b]}" --budget 145 \
  --shapes decode:1x1024,prefill:2048,decode:32x1024,decode:32x8192,prefill:8192,decode:8x8192,decode:1x8192,decode:8x1024 \
  --system cleave "${bench[*]} --model $scratch/8b --kv-cache 34GiB" \
  --system torch-compile "python3 $here/peers/torch_loop.py --model $scratch/8b"
stage long legs 60 python3 "$here/legs.py" --cleave "$cleave" --model "$scratch/1b" --name "${shapes[1b]}"
stage long memcheck 50 python3 "$here/kernel_tests.py" --bundle "$bundle" --root "$root" --sanitizer memcheck --limit 45 --jobs 8
stage long batching-8b 110 "${turns[@]}" --model "$scratch/8b" --name "${shapes[8b]}" --budget 105 --rounds 2 \
  --shapes decode:32x1024,prefill:2048,decode:8x1024,decode:8x8192,prefill:8192 \
  --system cleave "${bench[*]} --model $scratch/8b --kv-cache 34GiB" \
  --system transformers "python3 $here/peers/transformers_batching.py --model $scratch/8b --kv-bytes $((12 << 30))"
stage long llama-cpp 60 python3 "$here/peers/llama_cpp.py" --bundle "$bundle" --model "$scratch/1b" --name "${shapes[1b]}"
stage long racecheck 50 python3 "$here/kernel_tests.py" --bundle "$bundle" --root "$root" --sanitizer racecheck --limit 45 --jobs 8
stage long load 40 bash -c "python3 '$here/disk.py' '$scratch/1b' && python3 '$here/engine.py' --cleave '$cleave' --model '$scratch/1b' --name '${shapes[1b]}' --shapes decode:1x1024 --from disk"

report
cat "$out/table.md"
echo
echo "after $SECONDS s, in $out; scripts/gpu/report.py --collect takes the JSON into results/gpu, then --readme"
