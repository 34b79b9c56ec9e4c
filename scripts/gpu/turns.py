"""Measures several systems by turns on the same shapes of the same model.

usage: turns.py --model FOLDER --name NAME --shapes S,S,… --rounds N --budget SECONDS --system NAME 'COMMAND'
                [--system …]

Each system is a process that loads the model once, prints one line of JSON when it is ready (`load_seconds`), and
then answers each line of its input, a shape as `cleave bench engine --shapes` writes it (`prefill:2048`,
`decode:8x1024`), with one line: `{"seconds_median": …}` (of a decode step, or of the prompt), or `{"why": …}` if it
cannot. All are loaded at once; then for every shape, in every round, each has its turn while the others wait, so
that a card that gets warmer does so for all of them. Writes `decode`, `prefill` and `skipped` records after
each shape. Standard library only.
"""

import argparse
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import threading
import time

import record


class System:
    """A process that answers shapes."""

    def __init__(self, name: str, command: str) -> None:
        self.name = name
        self.why: str | None = None
        self.answers: queue.Queue[dict] = queue.Queue()
        quiet = os.environ | {"RUST_LOG": "warn"}
        self.child = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Reads the answers; lines that are not JSON come from libraries, and are passed on."""
        for line in self.child.stdout:
            try:
                answer = json.loads(line)
            except json.JSONDecodeError:
                answer = None
            if isinstance(answer, dict):
                self.answers.put(answer)
            else:
                print(f"{self.name}: {line.rstrip()}", file=sys.stderr)
        self.answers.put({"gone": True})

    def await_answer(self, limit: float) -> dict:
        """Returns the next answer within the limit; a system that sends none, or ends, is not asked again."""
        try:
            answer = self.answers.get(timeout=max(limit, 0.1))
        except queue.Empty:
            self.give_up(f"no answer in {limit:.0f} s")
            return {"why": self.why}
        if answer.get("gone"):
            self.give_up(f"ended by itself with {self.child.wait()}")
            return {"why": self.why}
        return answer

    def ask(self, shape: str, limit: float) -> dict:
        if self.why:
            return {"why": self.why}
        try:
            self.child.stdin.write(shape + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            self.give_up("ended by itself")
            return {"why": self.why}
        return self.await_answer(limit)

    def give_up(self, why: str) -> None:
        self.why = why
        print(f"{self.name}: {why}", file=sys.stderr)
        self.child.kill()

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.stdin.close()
            try:
                self.child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.child.kill()
        self.child.wait()


def put(system: str, model: str, shape: str, samples: list[float], beside: list[str]) -> None:
    """Writes a record of one system's samples of one shape."""
    kind, _, sizes = shape.partition(":")
    measured = {"seconds": statistics.median(samples), "samples": samples, "beside": beside}
    if kind == "prefill":
        record.put("prefill", system=system, model=model, tokens=int(sizes), **measured)
    else:
        batch, context = map(int, sizes.split("x"))
        record.put("decode", system=system, model=model, batch=batch, context=context, **measured)


def measure(systems: list[System], shape: str, args: argparse.Namespace, until: float) -> None:
    samples: dict[str, list[float]] = {system.name: [] for system in systems}
    why: dict[str, str] = {}
    for turn in range(args.rounds):
        for system in systems:
            if system.name in why:
                continue
            limit = min(args.shape_limit, until - time.monotonic())
            if limit <= 0:
                why[system.name] = "no time was left"
                continue
            answer = system.ask(shape, limit)
            if "why" in answer:
                why[system.name] = answer["why"]
            else:
                samples[system.name].append(answer["seconds_median"])
                told = f"{answer['seconds_median'] * 1e3:.3f} ms"
                print(f"{args.name} {shape} round {turn + 1} {system.name}: {told}", file=sys.stderr)
    for system in systems:
        if samples[system.name]:
            beside = [other.name for other in systems if other is not system and samples[other.name]]
            put(system.name, args.name, shape, samples[system.name], beside)
        elif reason := why.get(system.name):
            record.put("skipped", system=system.name, model=args.name, shape=shape, why=reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--shapes", required=True, type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=300, help="seconds for everything")
    parser.add_argument("--start-limit", type=float, default=150, help="seconds until a system is ready")
    parser.add_argument("--shape-limit", type=float, default=90, help="seconds for one answer; the first may compile")
    parser.add_argument("--system", action="append", nargs=2, required=True, metavar=("NAME", "COMMAND"))
    args = parser.parse_args()
    until = time.monotonic() + args.budget
    systems = [System(name, command) for name, command in args.system]
    for system in systems:
        about = system.await_answer(min(args.start_limit, until - time.monotonic()))
        if "why" in about:
            record.put("absent", what=f"{system.name} ({args.name})", why=about["why"])
        elif "load_seconds" in about:
            print(f"{system.name}: loaded in {about['load_seconds']:.1f} s", file=sys.stderr)
    ready = [system for system in systems if system.why is None]
    for shape in args.shapes:
        measure(ready, shape, args, until)
    for system in systems:
        system.end()


if __name__ == "__main__":
    main()
