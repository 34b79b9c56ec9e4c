#!/usr/bin/env python3
"""Measures every golden checkpoint in every number format of weights, and writes docs/benchmarks/families.md's tables.

usage: measure.py --run cpu|gpu|h100 [--prompts N] [--program FILE] [--jobs N] [--out FILE] [FOLDER ...]
       measure.py [--check]

--run runs the example `families` of the crate cleave-cuda: on the processor, by the stand-in driver, or on a real GPU
(CLEAVE_TEST_DEVICE=cuda is set). It is built if no --program is given; --jobs folders run at once. Its lines are kept
in a file of that name beside this script, or in --out. FOLDERs of testdata are measured alone; their lines replace
those of an earlier run. Without --run the tables are written from these files, or compared with the page (--check;
exit status 1: they differ).
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs/benchmarks/families.md"
BACKENDS = ["cpu", "gpu", "h100"]
# Columns of the tables, and the formats whose largest error each shows.
COLUMNS = {
    "f32": ["f32"],
    "bf16": ["bf16"],
    "f16": ["f16"],
    "fp8": ["fp8", "fp8 blocks", "fp8 modelopt"],
    "mxfp8": ["mxfp8"],
    "int8": ["int8", "gptq int8"],
    "int4": ["int4", "awq", "gptq"],
    "mxfp4": ["mxfp4"],
    "nvfp4": ["nvfp4", "nvfp4 modelopt"],
}
AT_LOAD = "--quantize "


def measured(command: list[str], backend: str, folder: str) -> list[list]:
    """The lines of one folder."""
    surroundings = os.environ | {"CARGO_MANIFEST_DIR": str(ROOT / "crates/cuda")}
    if backend not in ("cpu", "gpu"):
        surroundings["CLEAVE_TEST_DEVICE"] = "cuda"
    done = subprocess.run(command + [folder], cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not lines:
        print(f"{folder}: the example ended with {done.returncode} after {len(lines)} lines", file=sys.stderr)
    return [[line[key] for key in ("folder", "format", "error", "problem", "paths")] for line in lines]


def run(args: argparse.Namespace) -> None:
    program = [args.program]
    if not args.program:
        program = ["cargo", "run", "--quiet", "--package", "cleave-cuda", "--example", "families", "--"]
    command = program + ["cpu" if args.run == "cpu" else "gpu", str(args.prompts)]
    folders = args.folders or sorted(path.parent.name for path in ROOT.glob("testdata/*/goldens.json"))
    file = args.out or HERE / f"{args.run}.json"
    lines = {}
    if file.exists():
        for line in json.loads(file.read_text())["lines"]:
            lines.setdefault(line[0], []).append(line)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for folder, own in zip(folders, pool.map(lambda folder: measured(command, args.run, folder), folders)):
            lines[folder] = own
            # Written after each folder, so that an early end loses little.
            texts = ",\n".join(json.dumps(line) for name in sorted(lines) for line in lines[name])
            file.write_text(f'{{"prompts": {args.prompts}, "lines": [\n{texts}\n]}}\n')


def cell(lines: list[list], column: str) -> str:
    if not lines:
        return ""
    if any(problem for *_, problem, _ in lines):
        return "refused"
    error = max(error for _, _, error, _, _ in lines)
    text = f"{error:.0e}" if column == "f32" else f"{100 * error:.1f} %"
    return f"{text}, paths differ" if any(paths for *_, paths in lines) else text


def table(backend: str) -> list[str]:
    lines = json.loads((HERE / f"{backend}.json").read_text())["lines"]
    columns = [name for name, formats in COLUMNS.items() if any(line[1] in formats for line in lines)]
    rows = [f"| goldens | {' | '.join(columns)} | rounded at load |", "|" + "---|" * (len(columns) + 2)]
    for folder in sorted({line[0] for line in lines}):
        own = [line for line in lines if line[0] == folder]
        cells = [cell([line for line in own if line[1] in COLUMNS[column]], column) for column in columns]
        at_load = [line for line in own if line[1].startswith(AT_LOAD) and not line[3]]
        names = [line[1].removeprefix(AT_LOAD) + (", paths differ" if line[4] else "") for line in at_load]
        rows.append(f"| `{folder}` | {' | '.join(cells)} | {', '.join(names)} |")
    return rows


def page(text: str) -> str:
    for backend in BACKENDS:
        if not (HERE / f"{backend}.json").exists():
            continue
        begin, end = f"<!-- {backend}: begin, by scripts/lab/families/measure.py -->", f"<!-- {backend}: end -->"
        before, rest = text.split(begin)
        rows = "\n".join(table(backend))
        text = f"{before}{begin}\n\n{rows}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--run", choices=BACKENDS)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("folders", nargs="*")
    args = parser.parse_args()
    if args.run:
        run(args)
        return 0
    text = PAGE.read_text()
    made = page(text)
    if args.check:
        if made != text:
            print("docs/benchmarks/families.md is not what scripts/lab/families says: run scripts/lab/families/measure.py")
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
