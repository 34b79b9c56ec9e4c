#!/usr/bin/env python3
"""Measures every golden checkpoint in every number format of weights, and writes docs/benchmarks/families.md's tables.

usage: measure.py --run cpu|gpu [--prompts N] [FOLDER ...]
       measure.py [--check]

--run builds and runs the example `families` of the crate cleave-cuda, and keeps its lines in cpu.json or gpu.json
beside this script. FOLDERs of testdata are measured alone; their lines replace those of an earlier run. Without --run
the tables are written from these files, or compared with the page (--check; exit status 1: they differ).
"""

import argparse
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs/benchmarks/families.md"
BACKENDS = ["cpu", "gpu"]
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


def run(backend: str, prompts: int | None, folders: list[str]) -> None:
    count = [str(prompts)] if prompts else ["20"]
    command = ["cargo", "run", "--quiet", "--package", "cleave-cuda", "--example", "families", "--", backend]
    file = HERE / f"{backend}.json"
    kept = json.loads(file.read_text())["lines"] if file.exists() else []
    with subprocess.Popen(command + count + folders, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            found = json.loads(line)
            lines.append([found[key] for key in ("folder", "format", "error", "problem", "paths")])
            print(*lines[-1], flush=True)
    if process.returncode:
        sys.exit(f"the example ended with {process.returncode}")
    new = {line[0] for line in lines}
    all_lines = sorted([line for line in kept if line[0] not in new] + lines, key=lambda line: line[0])
    texts = ",\n".join(json.dumps(line) for line in all_lines)
    file.write_text(f'{{"prompts": {count[0]}, "lines": [\n{texts}\n]}}\n')


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
        begin, end = f"<!-- {backend}: begin, by scripts/lab/families/measure.py -->", f"<!-- {backend}: end -->"
        before, rest = text.split(begin)
        rows = "\n".join(table(backend))
        text = f"{before}{begin}\n\n{rows}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--run", choices=BACKENDS)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("folders", nargs="*")
    args = parser.parse_args()
    if args.run:
        run(args.run, args.prompts, args.folders)
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
