"""Runs one step of a run within a time limit. usage: step.py --limit S -- COMMAND…

The command gets a session of its own; past the limit the whole session is killed. A process that the driver holds and
that cannot be killed is left behind after PATIENCE seconds, so a GPU that hangs costs the run only the limit of one
step. Exits as the command does, or with 124 past the limit. Standard library only.
"""

import argparse
import os
import signal
import subprocess
import sys

PATIENCE = 5
TIMED_OUT = 124


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, required=True, help="seconds")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    child = subprocess.Popen(args.command, start_new_session=True)
    try:
        sys.exit(child.wait(timeout=args.limit) & 0xFF)
    except subprocess.TimeoutExpired:
        print(f"step: longer than {args.limit:g} s: {' '.join(args.command)[:200]}", file=sys.stderr)
    os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        print(f"step: process {child.pid} cannot be killed, and is left behind", file=sys.stderr)
    os._exit(TIMED_OUT)


if __name__ == "__main__":
    main()
