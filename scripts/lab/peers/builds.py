"""Two builds of Cleave by turns, on the same weights and shapes: docs/benchmarks/engines-cpu.md.

usage: builds.py --before BIN --after BIN --model HF_FOLDER [--formats bf16 int8 int4] [--shapes SHAPE...] [--rounds 5]
                 [--seconds N] [--threads N] [--kv-cache 1GiB] --out FILE [--go-on]

Both builds have the model in memory, in one format after the other, and are stopped (SIGSTOP) while the other one is
asked. In a round each shape is asked for four times, before-after-after-before, and each neighbouring pair gives a
ratio of speeds: a machine that drifts evenly does not change their mean. Before the first round of a run both are
asked once, untimed. --seconds ends the run after the round that takes it past so many; --go-on adds rounds to the
file, to the format that has fewest of them first.

Printed, and made by tables.py: the median of the ratios for each shape and format, and how many there are.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from engines import Engine

NAMES = {
    "prefill:128": "prefill 128",
    "prefill:512": "prefill 512",
    "prefill:2048": "prefill 2048",
    "decode:1x128": "decode b1",
    "decode:8x128": "batch 8",
    "decode:32x128": "batch 32",
}
FORMATS = ["bf16", "int8", "int4"]
CONTEXT = 2304

# Ratios by format and shape.
Ratios = dict[str, dict[str, list[float]]]


def engine(name: str, program: str, form: str, args: argparse.Namespace) -> Engine:
    command = [program, "bench", "engine", "--stdin", "--threads", str(args.threads), "--rounds", "1"]
    command += ["--dtype", "bf16", "--max-model-len", str(CONTEXT), "--kv-cache", args.kv_cache, "--model", args.model]
    return Engine(f"{name} {form}", command if form == "bf16" else [*command, "--quantize", form])


def speed(of: Engine, shape: str) -> float:
    return of.ask(shape)["tokens_per_second_median"]


def ask_round(before: Engine, after: Engine, shapes: list[str], number: int, ratios: dict[str, list[float]], is_first: bool) -> None:
    for shape in shapes:
        # The outer build changes from round to round.
        outer, inner = (before, after) if number % 2 == 0 else (after, before)
        if is_first:
            speed(before, shape), speed(after, shape)
        speeds = [speed(of, shape) for of in (outer, inner, inner, outer)]
        pairs = [(speeds[0], speeds[1]), (speeds[3], speeds[2])]
        for one, other in pairs:
            ratios.setdefault(shape, []).append(other / one if outer is before else one / other)
        last = ", ".join(f"{ratio:.3f}" for ratio in ratios[shape][-2:])
        print(f"{time.strftime('%H:%M:%S')} {number} {before.name:12} {shape:14} {max(speeds):8.1f} {last}", flush=True)


def table(ratios: Ratios) -> str:
    """The table of medians of all formats."""
    asked = [shape for shape in NAMES if any(shape in of_format for of_format in ratios.values())]
    lines = ["| median of after / before (pairs) | " + " | ".join(NAMES[shape] for shape in asked) + " |", "|---|" + "---|" * len(asked)]
    for form, of_format in ratios.items():
        cells = [of_format.get(shape, []) for shape in asked]
        texts = [f"{statistics.median(found):.3f} ({len(found)})" if found else "" for found in cells]
        lines.append(f"| {form} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def measure(args: argparse.Namespace, ratios: Ratios) -> None:
    from_time = time.monotonic()
    rounds_of = {form: min((len(found) // 2 for found in ratios.get(form, {}).values()), default=0) for form in args.formats}
    for form in sorted(args.formats, key=lambda form: rounds_of[form]):
        pair = [engine(name, program, form, args) for name, program in (("before", args.before), ("after", args.after))]
        try:
            for one in pair:
                one.start(Path(args.out).parent)
            for number in range(rounds_of[form], rounds_of[form] + args.rounds):
                if args.seconds and time.monotonic() - from_time > args.seconds:
                    return
                ask_round(pair[0], pair[1], args.shapes, number, ratios.setdefault(form, {}), is_first=number == rounds_of[form])
                Path(args.out).write_text(json.dumps(ratios, indent=1) + "\n")
        finally:
            for one in pair:
                one.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--before", "--after", "--model", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--shapes", nargs="+", choices=NAMES, default=list(NAMES), metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each format in this run")
    parser.add_argument("--seconds", type=float, help="limit of the run's time, counted after each round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-cache", default="1GiB", help="memory for keys and values of each build")
    parser.add_argument("--go-on", action="store_true", help="add to the rounds that the file of --out has")
    args = parser.parse_args()
    if Path(args.out).exists() and not args.go_on:
        parser.error(f"--out: {args.out} is there already: --go-on adds to it")
    for name in ("before", "after", "model"):
        if not Path(getattr(args, name)).exists():
            parser.error(f"--{name}: there is no {getattr(args, name)}")
    # Engines that are stopped do not end by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ratios: Ratios = json.loads(Path(args.out).read_text()) if Path(args.out).exists() else {}
    measure(args, ratios)
    print("\n" + table(ratios))


if __name__ == "__main__":
    main()
