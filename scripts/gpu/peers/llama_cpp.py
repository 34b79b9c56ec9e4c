"""A peer: llama.cpp's llama-bench on the same shape, if the bundle has it.

usage: llama_cpp.py --bundle FOLDER --model FOLDER --name NAME

llama-bench measures one sequence; the checkpoint becomes a bf16 GGUF file first. Writes `decode`, `prefill` and
`absent` records.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import record
import turns

PROMPTS = (512, 2048, 8192)
CONTEXTS = (1024, 8192)


def bench(program: Path, file: Path, flags: list[str]) -> list[dict]:
    command = [str(program), "-m", str(file), "-ngl", "99", "-fa", "1", "-ub", "2048", "-r", "3", "-o", "json", *flags]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    program = args.bundle / "peers/llama-bench"
    if not program.exists():
        record.put("absent", what="llama.cpp", why="the bundle has no llama-bench: scripts/gpu/peers/build_llama_cpp.sh")
        return
    file = args.model / "model.gguf"
    converter = Path(__file__).resolve().parents[2] / "lab/peers/to_gguf.py"
    if not file.exists():
        paths = [str(args.bundle / "peers/python"), os.environ.get("PYTHONPATH", "")]
        surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        unfinished = file.with_suffix(".part")
        subprocess.run([sys.executable, converter, args.model, unfinished], check=True, env=surroundings)
        unfinished.rename(file)
    for tokens in PROMPTS:
        rows = bench(program, file, ["-p", str(tokens), "-n", "0"])
        turns.put("llama.cpp", args.name, f"prefill:{tokens}", [tokens / rows[0]["avg_ts"]], [])
    for context in CONTEXTS:
        rows = bench(program, file, ["-p", "0", "-n", "32", "-d", str(context)])
        turns.put("llama.cpp", args.name, f"decode:1x{context}", [1 / rows[0]["avg_ts"]], [])


if __name__ == "__main__":
    main()
