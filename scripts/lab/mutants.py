#!/usr/bin/env python3
"""Draws random mutants of the pure crates and counts how many the tests catch.

A mutant is a small change of the code (a function that returns a constant, `<` for `<=`, a removed `!`)
made by cargo-mutants (`cargo install cargo-mutants --locked`). A mutant that no test notices marks a rule
that nothing checks. The draw depends on the seed and on the code alone, so a run can be repeated.

    scripts/lab/mutants.py --count 300 --seed 1 --out target/mutants
    scripts/lab/mutants.py --count 40 --package cleave-kv --file crates/kv/src/pool.rs

Each mutant runs against the tests of its own crate first; those that pass run against the crates that use it
(see USERS), unless --own-tests-only is given. The tree is changed in place and restored, so the script wants a
checkout of its own without uncommitted changes. No page of docs/benchmarks has its figures: a mutant that was missed
becomes a test. Exit status: 1 if the share of caught mutants is below --least.
"""

import argparse
import json
import pathlib
import random
import re
import subprocess
import sys

PACKAGES = ["cleave-kv", "cleave-sched", "cleave-router", "cleave-planner"]
# Crates whose tests may catch mutants that the crate's own tests miss.
USERS = {
    "cleave-kv": ["cleave-sched", "cleave-sim"],
    "cleave-sched": ["cleave-sim"],
    "cleave-router": ["cleave-sim"],
    "cleave-planner": ["cleave-router", "cleave-sim"],
}
# A mutant whose tests run longer than this is caught: it hangs. The tests of the crates themselves take seconds.
OWN_TIMEOUT_SECONDS = 150
USERS_TIMEOUT_SECONDS = 600


def listed(packages, files):
    """All mutants of the packages, or of the files alone."""
    command = ["cargo", "mutants", "--list", "--json"]
    for package in packages:
        command += ["--package", package]
    for file in files:
        command += ["--file", file]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return [(mutant["package"], mutant["name"]) for mutant in json.loads(found.stdout)]


def run(names, package, tested, timeout_seconds, out):
    """Runs the mutants against the tests of `tested`; returns the outcome of each by its name."""
    out.mkdir(parents=True, exist_ok=True)
    exactly = "^(" + "|".join(re.escape(name) for name in names) + ")$"
    command = ["cargo", "mutants", "--in-place", "--baseline", "skip", "--timeout", str(timeout_seconds)]
    command += ["--no-shuffle", "--package", package, "--re", exactly, "--output", str(out)]
    for crate in tested:
        command += ["--test-package", crate]
    # cargo-mutants exits with 2 where a mutant was missed and with 3 after a time-out.
    status = subprocess.run(command, check=False).returncode
    if status not in (0, 2, 3):
        sys.exit(f"cargo mutants failed with status {status}; see {out}/mutants.out/debug.log")
    outcomes = json.loads((out / "mutants.out" / "outcomes.json").read_text())["outcomes"]
    return {outcome["scenario"]["Mutant"]["name"]: outcome["summary"] for outcome in outcomes}


def judge(package, names, out, own_tests_only):
    """The mutants of one package: how many were viable, and the names of those that nothing caught."""
    first = run(names, package, [package], OWN_TIMEOUT_SECONDS, out / package / "own")
    viable = [name for name, outcome in first.items() if outcome != "Unviable"]
    missed = [name for name, outcome in first.items() if outcome == "MissedMutant"]
    if missed and not own_tests_only:
        second = run(missed, package, USERS[package], USERS_TIMEOUT_SECONDS, out / package / "users")
        missed = [name for name, outcome in second.items() if outcome == "MissedMutant"]
    return len(viable), missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw over all packages (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this crate; may be repeated")
    parser.add_argument("--file", action="append", default=[], help="only mutants of this file; may be repeated")
    parser.add_argument("--least", type=float, default=0.75, help="least share of caught mutants (default 0.75)")
    parser.add_argument(
        "--own-tests-only",
        action="store_true",
        help="run the tests of the mutant's own crate alone: sooner, and the share is a lower bound",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/mutants"), help="folder of the logs")
    arguments = parser.parse_args()

    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], check=True, capture_output=True, text=True)
    if changed.stdout:
        sys.exit("uncommitted changes: commit them first, because mutants are made in this checkout")
    mutants = listed(arguments.package or PACKAGES, arguments.file)
    drawn = random.Random(arguments.seed).sample(mutants, min(arguments.count, len(mutants)))

    caught_all, viable_all = 0, 0
    for package in arguments.package or PACKAGES:
        names = [name for of, name in drawn if of == package]
        if not names:
            continue
        viable, missed = judge(package, names, arguments.out, arguments.own_tests_only)
        caught_all, viable_all = caught_all + viable - len(missed), viable_all + viable
        print(f"{package}: {viable - len(missed)} of {viable} caught", flush=True)
        for name in missed:
            print(f"  missed: {name}", flush=True)
    share = caught_all / max(viable_all, 1)
    print(f"all: {caught_all} of {viable_all} caught, {share:.2f} (seed {arguments.seed})")
    sys.exit(share < arguments.least)


if __name__ == "__main__":
    main()
