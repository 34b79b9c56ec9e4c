"""Runs the backend's tests on the real device, each in a process of its own.

usage: kernel_tests.py --bundle FOLDER --root REPOSITORY [--device cuda|stand-in] [--sanitizer TOOL] [--limit S]
                       [--jobs N] [NAME …]

A kernel that reads an invalid address breaks all later calls of its process, and one failure would look like many; so
each test has a process. With --sanitizer (memcheck, racecheck, initcheck, synccheck) they run under compute-sanitizer.
Runs the tests whose names contain one of NAME, or all. Writes `tests` or `sanitizer` records, and the output of failing
tests to standard error. Exits with 1 if a test failed. Standard library only.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT

import record
import tools

# The exit status of compute-sanitizer with findings; a failed test exits with 101.
FOUND = 77


@dataclass(frozen=True)
class Test:
    suite: str
    program: Path
    name: str

    @property
    def name_in_suite(self) -> str:
        return self.name.removeprefix(f"{self.suite}::")


@dataclass(frozen=True)
class Outcome:
    test: Test
    status: str
    seconds: float
    said: str


def tests(bundle: Path, wanted: list[str]) -> list[Test]:
    with open(bundle / "manifest.json") as file:
        suites = json.load(file)["tests"]
    found = []
    for suite in suites:
        program = bundle / suite
        listing = subprocess.run([program, "--list", "--format", "terse"], capture_output=True, text=True, check=True)
        names = [line.removesuffix(": test") for line in listing.stdout.splitlines() if line.endswith(": test")]
        found += [test_of(program, name) for name in names if not wanted or any(w in name for w in wanted)]
    # Tests run in the order of the names that were given.
    found.sort(key=lambda test: next((at for at, w in enumerate(wanted) if w in test.name), len(wanted)))
    return found


def test_of(program: Path, name: str) -> Test:
    """A module of the program `all` is a suite."""
    module, _, _ = name.partition("::")
    return Test(module if program.name == "all" else program.name, program, name)


def run(test: Test, args: argparse.Namespace) -> Outcome:
    command = [str(test.program), "--exact", test.name, "--nocapture", "--test-threads", "1"]
    if args.sanitizer:
        tool = [args.tool, "--tool", args.sanitizer, "--error-exitcode", str(FOUND), "--target-processes", "all"]
        command = tool + command
    # Tests find the repository's test data by cargo's variable for the folder of their crate.
    surroundings = os.environ | {"CARGO_MANIFEST_DIR": str(args.root / "crates/cuda")}
    if args.device == "cuda":
        surroundings["CLEAVE_TEST_DEVICE"] = "cuda"
    began = time.monotonic()
    # A sanitizer starts the test as a child, which a signal to the sanitizer alone would leave on the GPU.
    child = subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=surroundings, errors="replace", start_new_session=True)
    try:
        said, _ = child.communicate(timeout=args.limit)
        code = child.returncode
        status = "ok" if code == 0 else "found" if code == FOUND else f"exit {code}"
        if "skipped: " in said and status == "ok":
            status = "skipped"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        status = f"longer than {args.limit:g} s"
    return Outcome(test, status, time.monotonic() - began, said)


def tell(outcome: Outcome) -> None:
    test = outcome.test
    print(f"{outcome.status:12} {outcome.seconds:7.2f} s  {test.suite}: {test.name_in_suite}", file=sys.stderr)
    if outcome.status not in ("ok", "skipped"):
        print(outcome.said[-4000:], file=sys.stderr)
    # Findings of a test are recorded without a failure, such as the number of wgmma sums that differ.
    for found in re.finditer(r"(?:wgmma|multiprocessors): .*", outcome.said):
        print(found[0], file=sys.stderr)
        record.put("finding", test=test.name_in_suite, text=found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "stand-in"], default="cuda")
    parser.add_argument("--sanitizer")
    parser.add_argument("--limit", type=float, default=20, help="seconds for one test: a hang costs no more")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    args.tool = tools.find("compute-sanitizer", args.bundle)
    if args.sanitizer and args.tool is None:
        why = "neither on the PATH, nor a Python package, nor in the bundle"
        record.put("absent", what=f"compute-sanitizer ({args.sanitizer})", why=why)
        print(f"compute-sanitizer is {why}")
        sys.exit(record.ABSENT)
    listed = tests(args.bundle, args.names)
    # A name without a test fails the stage, after the other tests have run.
    missing = [name for name in args.names if not any(name in test.name for test in listed)]
    if missing:
        print(f"no test is named {', '.join(missing)}", file=sys.stderr)
    outcomes = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(lambda test: run(test, args), listed):
            tell(outcome)
            outcomes.append(outcome)
    for suite in dict.fromkeys(test.suite for test in listed):
        of = [outcome for outcome in outcomes if outcome.test.suite == suite]
        bad = [outcome for outcome in of if outcome.status not in ("ok", "skipped")]
        wrong = [f"{outcome.test.name_in_suite} ({outcome.status})" for outcome in bad]
        record.put(
            "sanitizer" if args.sanitizer else "tests",
            suite=suite,
            **({"tool": args.sanitizer} if args.sanitizer else {"device": args.device}),
            passed=sum(outcome.status == "ok" for outcome in of),
            skipped=sum(outcome.status == "skipped" for outcome in of),
            failed=wrong,
            seconds=round(sum(outcome.seconds for outcome in of), 1),
        )
    if missing or any(outcome.status not in ("ok", "skipped") for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
