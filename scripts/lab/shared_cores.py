"""Cost of an idle server, of its first prompt, and of two legs on the same cores: docs/benchmarks/loading.md.

usage: shared_cores.py --cleave BIN --model DIR [--tokens N] [--rounds N]

Each round starts every kind of server in turn, alone on the machine. Eight prompts of N random tokens (default 512),
one after the other: the time to the first token of the first, which touches memory for the first time, and the median
of the other seven. Then the processor time of ten seconds without a request. Memory is the process's at its highest
(VmHWM). Legs that share cores have all of them each; legs of their own have half.

Prints Markdown, medians of the rounds. Standard library only; Linux.
"""

import argparse
import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from servers import complete, process, read_on, wait_for

CORES = os.cpu_count()
LEGS = ["--prefill", "1", "--decode", "1", "--placement", "split"]
KINDS = {
    "one worker": [],
    "two legs on all cores": LEGS,
    "two legs, cores of their own": [*LEGS, "--cpu-bind", f"0-{CORES - 1}", "--threads", str(CORES)],
}
PROMPTS, IDLE_SECONDS = 8, 10


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(args: argparse.Namespace, flags: list[str], dice: random.Random) -> dict[str, float]:
    vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    with ExitStack() as life:
        words = ["serve", "--port", "0", "--kv-cache", "1GiB", "--model", args.model, *flags]
        server = life.enter_context(process(args.cleave, *words))
        address = wait_for(server, r"listening on http://(\S+)")
        read_on(server)
        took = []
        for _ in range(PROMPTS):
            prompt = [dice.randrange(3, vocabulary) for _ in range(args.tokens)]
            start = time.monotonic()
            complete(address, prompt, 1)
            took.append(time.monotonic() - start)
        before, start = processor_seconds(server.pid), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (processor_seconds(server.pid) - before) / (time.monotonic() - start)
        lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {"first": took[0] * 1e3, "others": statistics.median(took[1:]) * 1e3, "idle": idle * 1e3, "memory": most / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
    for number in range(args.rounds):
        for name, flags in KINDS.items():
            found[name].append(measured(args, flags, random.Random(number)))
    print(f"| {args.tokens} tokens | first prompt | others | processor time without a request | memory |")
    print("|---|---|---|---|---|")
    for name, rounds in found.items():
        middle = {of: statistics.median(one[of] for one in rounds) for of in rounds[0]}
        print(f"| {name} | {middle['first']:.0f} ms | {middle['others']:.0f} ms | {middle['idle']:.1f} ms a second | {middle['memory']:.0f} MB |")


if __name__ == "__main__":
    main()
