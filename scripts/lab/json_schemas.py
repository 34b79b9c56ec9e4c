#!/usr/bin/env python3
"""Compares constrained JSON with suites of schemas that other projects wrote.

usage: json_schemas.py [--suites FOLDER]

The schemas and instances of MaskBench (github.com/guidance-ai/jsonschemabench) and of JSON-Schema-Test-Suite (draft
2020-12, as in the source of the Python package jsonschema) are fed to the matcher by the example `json_schemas` of
crates/grammar. Both are fetched into --suites, by default target/json-schemas, unless they are there as its folders
`maskbench` and `draft2020-12`. Prints the counts of docs/benchmarks/structured-output.md, then each instance on which
suite and matcher differ. Exit status: 1 if an instance that MaskBench calls invalid was accepted, or a schema failed.
"""

import argparse
import collections
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MASKBENCH = "https://github.com/guidance-ai/jsonschemabench"
JSONSCHEMA = "jsonschema==4.26.0"


def fetch_maskbench(folder):
    """Copies MaskBench's data; its repository also has schemas without instances."""
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "--depth", "1", "--quiet", MASKBENCH, clone], check=True)
        shutil.copytree(pathlib.Path(clone) / "maskbench" / "data", folder)


def fetch_draft(folder):
    """Unpacks the suite that the package jsonschema carries."""
    with tempfile.TemporaryDirectory() as source:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", source, JSONSCHEMA]
        subprocess.run(command, check=True)
        (archive,) = pathlib.Path(source).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
        (tests,) = pathlib.Path(source).glob("*/json/tests/draft2020-12")
        shutil.copytree(tests, folder)


def summarize(name, lines):
    """Prints a row of the table, the reasons of refusals and the differences; returns whether one is a fault."""
    outcomes = collections.Counter(line["outcome"] for line in lines)
    wrong = [(line["file"], instance) for line in lines for instance in line.get("wrong", [])]
    verdicts = collections.Counter(instance["verdict"] for _, instance in wrong)
    instances = sum(line.get("valid", 0) + line.get("invalid", 0) for line in lines)
    counts = [len(lines), *(outcomes[outcome] for outcome in ("accepted", "refused", "complex", "failed")), instances,
              *(verdicts[verdict] for verdict in ("accepted", "refused", "too complex", "mask and replay differ"))]
    print("| " + " | ".join([name, *map(str, counts)]) + " |")
    reasons = collections.Counter(line["reason"] for line in lines if line["outcome"] == "refused")
    for reason, count in reasons.most_common(20):
        print(f"  {count} refused: {reason[:110]}")
    for file, instance in wrong:
        print(f"  {instance['verdict']}: {pathlib.Path(file).name}: {json.dumps(instance['data'])[:160]}")
    return outcomes["failed"] or (name == "maskbench" and verdicts["accepted"])


def print_largest(lines, count=10):
    """Prints a table of the longest schemas: what became of each, and how long its compilation took."""
    print("| schema | bytes | outcome | compiled in | longest mask |\n|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: -line["bytes"])[:count]:
        took, mask = (f"{line[key]:.1f} ms" if key in line else "" for key in ("compile_ms", "mask_ms_max"))
        name = pathlib.Path(line["file"]).stem
        print(f"| `{name}` | {line['bytes']:,} | {line.get('reason', line['outcome'])} | {took} | {mask} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=pathlib.Path, default=ROOT / "target" / "json-schemas")
    suites = parser.parse_args().suites
    is_faulty = False
    for name, fetch in (("maskbench", fetch_maskbench), ("draft2020-12", fetch_draft)):
        folder = suites / name
        if not folder.is_dir():
            suites.mkdir(parents=True, exist_ok=True)
            fetch(folder)
        command = ["cargo", "run", "--quiet", "--release", "-p", "cleave-grammar", "--example", "json_schemas", "--", str(folder)]
        run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        is_faulty |= bool(summarize(name, lines))
        if name == "maskbench":
            print_largest(lines)
    sys.exit(is_faulty)


if __name__ == "__main__":
    main()
