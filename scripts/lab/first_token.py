#!/usr/bin/env python3
"""Times the first use of Cleave: from a clone without build results to the first token of an answer.

    scripts/lab/first_token.py [COMMIT …] [--rounds N]

For each commit (HEAD by default) it clones this repository into a folder of its own, runs the command of the README,
`cargo run --release -- serve`, and asks the server for one token. The crates' sources are fetched before the clock
starts, so that the network's speed is not part of the figures. Prints the rows of docs/benchmarks/loading.md; the
processor time of the whole, build and first token, depends less on what else the machine does than the clock.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTENING = "listening on "


def first_token(address: str) -> None:
    """Asks the server at `address` for one token, and fails without it."""
    body = json.dumps({"prompt": "The borrow checker", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        if json.load(answer)["usage"]["completion_tokens"] != 1:
            sys.exit("first_token.py: the answer has no token")


def processor_seconds() -> float:
    """Returns the processor time of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(commit: str) -> tuple[float, float, float]:
    """Returns the seconds to the line `listening on`, and to the first token, both from the start of the command, and
    the processor time of the command."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        subprocess.run(["git", "checkout", "-q", commit], cwd=folder, check=True)
        subprocess.run(["cargo", "fetch", "-q", "--locked"], cwd=folder, check=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CARGO_")}
        began, processor_began = time.monotonic(), processor_seconds()
        with open(Path(folder, "build.log"), "w") as log:
            server = subprocess.Popen(
                ["cargo", "run", "--release", "--", "serve", "--port", "0"],
                cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )
        try:
            for line in server.stdout:
                if LISTENING in line:
                    address = line.split(LISTENING)[1].strip()
                    break
            else:
                sys.exit(f"first_token.py: {commit} does not serve: {Path(folder, 'build.log').read_text()[-2000:]}")
            listening = time.monotonic() - began
            first_token(address)
            token = time.monotonic() - began
        finally:
            # cargo hands its place to the server, or waits for it; both are in the session of their own.
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()
        return listening, token, processor_seconds() - processor_began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", default=["HEAD"], help="what to measure, by turns")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    seconds: dict[str, list[tuple[float, float, float]]] = {commit: [] for commit in args.commits}
    for _ in range(args.rounds):
        for commit in args.commits:
            seconds[commit].append(measure(commit))
            print("{}: listening after {:.0f} s, first token after {:.1f} s, processor time {:.0f} s".format(
                commit, *seconds[commit][-1]), file=sys.stderr)
    print("| commit | ready | first token | processor time |\n|---|---|---|---|")
    for commit, rounds in seconds.items():
        name = subprocess.run(["git", "rev-parse", "--short", commit], cwd=ROOT, check=True, capture_output=True,
                              text=True).stdout.strip()
        ready, token, processor = (statistics.median(column) for column in zip(*rounds))
        print(f"| {name} | {ready:.0f} s | {token:.0f} s | {processor:.0f} s |")


if __name__ == "__main__":
    main()
