"""Measures Cleave's engine alone on one model by `cleave bench engine`.

usage: engine.py --cleave BIN --model FOLDER --name NAME [--shapes S,S,…] [--rounds N] [-- arguments of bench engine]

Writes `load`, `decode`, `gap`, `prefill` and `skipped` records. Standard library only.
"""

import argparse
import json
import subprocess
import sys

import record
import turns
from model import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--shapes")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--system", default="cleave", help="what records call it")
    parser.add_argument("--from", dest="source", choices=["memory", "disk"], default="memory", help="where weights are read")
    parser.add_argument("more", nargs="*")
    args = parser.parse_args()
    command = [args.cleave, "bench", "engine", "--device", args.device, "--dtype", "bf16", "--model", args.model]
    command += ["--rounds", args.rounds, "--json", *(["--shapes", args.shapes] if args.shapes else []), *args.more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    table = json.loads(done.stdout)
    stored = Model.of(args.model, args.name).stored_bytes
    load = {"seconds": table["weights_seconds"], "start_seconds": table["load_seconds"], "from": args.source}
    record.put("load", system=args.system, model=args.name, bytes=stored, **load)
    for row in table["rows"]:
        print(f"{args.name} {row['shape']}: {row['seconds_median'] * 1e3:.3f} ms", file=sys.stderr)
        turns.put(args.system, args.name, row["shape"], [row["seconds_median"]], [])
        if "idle_seconds_median" in row:
            record.put("gap", name=f"{args.name} {row['shape']}", seconds=row["idle_seconds_median"])
    for row in table["skipped"]:
        record.put("skipped", system=args.system, model=args.name, **row)


if __name__ == "__main__":
    main()
