"""Runs every lab of the bundle in turn. usage: labs.py --bundle FOLDER [--limit S] [--only PROGRAM] [--tiny]

A lab prints records, a line each (kernels/include/lab.h), which are passed on at once; its flag --brief selects the
most important shapes. Exits with 1 if a lab fails or a variant is wrong. Standard library only.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import record

# The kernels of a decode step and of a prompt come first: a run may be cut off.
IMPORTANCE = ["operations", "flashinfer", "matmul", "experts", "attend", "sample", "blocks", "norm", "rotate", "gate", "gather", "embed"]

def run(program: Path, limit: float, size: str) -> bool:
    """Runs a lab; returns whether it ended and everything was right."""
    is_right = True
    with subprocess.Popen(["timeout", str(limit), str(program), size], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            try:
                fields = json.loads(line)
                kind = fields.pop("kind")
            except (json.JSONDecodeError, KeyError):
                print(f"{program.name}: {line.rstrip()}", file=sys.stderr)
                continue
            record.put(kind, **fields)
            if kind == "lab":
                is_right &= told(fields)
    if child.returncode != 0:
        record.put("skipped", system="lab", model=program.name, shape="", why=f"exit {child.returncode}")
    return is_right and child.returncode == 0


def importance(program: Path) -> tuple[int, str]:
    known = program.name in IMPORTANCE
    return (IMPORTANCE.index(program.name) if known else len(IMPORTANCE), program.name)


def told(lab: dict) -> bool:
    wrong = lab["error"] > lab["tolerance"]
    rate = lab.get("bytes", lab.get("operations", 0)) / lab["seconds"]
    name = f"{lab['lab']} {lab['variant']}, {lab['shape']}"
    verdict = f"error {lab['error']:.2g}, WRONG" if wrong else f"error {lab['error']:.2g}"
    print(f"{name}: {lab['seconds'] * 1e6:.1f} µs, {rate:.4g}/s, {verdict}", file=sys.stderr)
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one lab")
    parser.add_argument("--only", type=Path, action="append", help="these programs, and no others")
    parser.add_argument("--tiny", action="store_true", help="small shapes, of labs that have some")
    args = parser.parse_args()
    programs = args.only or sorted((args.bundle / "labs").glob("*"), key=importance)
    if not programs:
        record.put("absent", what="labs", why="the bundle has none")
    size = "--tiny" if args.tiny else "--brief"
    if not all([run(program, args.limit, size) for program in programs]):
        sys.exit(1)


if __name__ == "__main__":
    main()
