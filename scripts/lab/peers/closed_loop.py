"""Servers under closed-loop load: samples of docs/benchmarks/servers-cpu.md (tables.py makes the page).

usage: closed_loop.py --cleave BIN --model DIR [--int8 DIR] [--llama-server BIN --gguf FILE] [--vllm DIR]
                      [--streams 16] [--input 256] [--output 64] [--each 4] [--rounds 3] [--out FILE]

Every one of a number of streams asks again as soon as it is answered, until it has asked often enough. Each round
starts every server in turn, in an order that rotates, alone on the machine; one request by each stream warms it up and
is not counted, then every stream asks --each times; the last requests of a run have fewer beside them. Prompts are
random tokens, so that no two begin alike. Cleave runs as it is, with --quantize int8 and with int4; llama.cpp with the
file of --gguf and the q8_0 one beside it (engines.py makes it); vLLM with --model and with --int8 (compressed-tensors
W8A8). Prints Markdown, medians of the rounds: requests a second, time to the first token and between two pieces of
text. Standard library only.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import goodput
from goodput import Ask, Place, prompt_of, say, started
from systems import SYSTEMS, System

# Tokens of a context beyond prompt and answer, so that no server's rounding of it matters.
SPARE_TOKENS = 64
# Errors of a server that ends or answers with something else, or of a config.json that lacks something.
FAULTS = (OSError, RuntimeError, http.client.HTTPException, ValueError, KeyError, IndexError)


@dataclass
class Contender:
    """A server, and the model that it serves."""

    system: System
    args: argparse.Namespace


def contenders(args: argparse.Namespace) -> list[Contender]:
    known = {system.name: system for system in SYSTEMS}

    def of(name: str, label: str, flags: tuple[str, ...] = (), **other: str) -> Contender:
        system = replace(known[name], name=label, command=[*known[name].command, *flags])
        own = copy(args)
        vars(own).update(other)
        return Contender(system, own)

    found = [of("cleave whole, one worker", "Cleave bf16")]
    for form in ("int8", "int4"):
        found.append(of("cleave whole, one worker", f"Cleave {form}", ("--quantize", form)))
    if args.llama_server:
        found.append(of("llama.cpp", "llama.cpp bf16"))
        narrow = args.gguf.removesuffix(".gguf") + "-q8_0.gguf"
        if Path(narrow).exists():
            found.append(of("llama.cpp", "llama.cpp q8_0", gguf=narrow))
    if args.vllm:
        found.append(of("vLLM", "vLLM bf16"))
        if args.int8:
            found.append(of("vLLM", "vLLM w8a8", model=args.int8))
    return found


def wait_until_ready(server: goodput.Server) -> None:
    end = time.monotonic() + goodput.STARTING_SECONDS
    while not goodput.is_ready(server):
        if time.monotonic() > end:
            raise RuntimeError("not ready in time")
        time.sleep(0.2)


def percentile(values: list[float], of: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(of * len(values)))]


def sample(contender: Contender, logs: Path, dice: random.Random) -> dict[str, float]:
    """Rates and latencies of one run, as clients see them."""
    args = contender.args
    config = json.loads((Path(args.model) / "config.json").read_text())

    def stream(times: int) -> list[Ask]:
        return [Ask(server.port, prompts.pop(), args.output) for _ in range(times)]

    with ExitStack() as life:
        server = life.enter_context(started(contender.system, Place(args, config), logs))
        wait_until_ready(server)
        prompts = [prompt_of(args.input, config["vocab_size"], dice) for _ in range(args.streams * (args.each + 1))]
        pool = life.enter_context(ThreadPoolExecutor(args.streams))
        list(pool.map(stream, [1] * args.streams))
        start = time.monotonic()
        asked = [ask for asks in pool.map(stream, [args.each] * args.streams) for ask in asks]
        took = time.monotonic() - start
    gaps = [gap for ask in asked for gap in ask.gaps]
    return {
        "requests_per_second": len(asked) / took,
        "ttft_p50_ms": statistics.median(ask.ttft for ask in asked) * 1e3,
        "ttft_p99_ms": percentile([ask.ttft for ask in asked], 0.99) * 1e3,
        "gap_p50_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": percentile(gaps, 0.99) * 1e3,
    }


def table(samples: dict[str, list[dict[str, float]]]) -> str:
    """The table in Markdown, medians of the rounds."""
    lines = ["| server | requests/s | TTFT p50 | TTFT p99 | between pieces p50 | p99 |", "|---|---|---|---|---|---|"]
    for name, felt in samples.items():
        if felt:
            middle = {of: statistics.median(one[of] for one in felt) for of in felt[0]}
            cells = [f"{middle['requests_per_second']:.2f}"] + [f"{value:.0f} ms" for of, value in middle.items() if of.endswith("_ms")]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    for name in ("--int8", "--llama-server", "--gguf", "--vllm", "--out"):
        parser.add_argument(name)
    for name, default in (("streams", 16), ("input", 256), ("output", 64), ("each", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, help="tokens of a request at most; --input, --output and some to spare if not given")
    parser.add_argument("--only", nargs="*", help="servers by the beginning of their names")
    parser.add_argument("--log", default="target/peers", help="folder for what the servers say")
    args = parser.parse_args()
    if args.llama_server and not args.gguf:
        parser.error("--llama-server serves the file of --gguf: name it (to_gguf.py makes it)")
    if args.context is None:
        args.context = -(-(args.input + args.output + SPARE_TOKENS) // SPARE_TOKENS) * SPARE_TOKENS
    found = contenders(args)
    for start in args.only or []:
        if not any(one.system.name.startswith(start) for one in found):
            parser.error(f"--only {start!r}: there are {', '.join(one.system.name for one in found)}")
    found = [one for one in found if not args.only or one.system.name.startswith(tuple(args.only))]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs = Path(args.log)
    logs.mkdir(parents=True, exist_ok=True)
    samples: dict[str, list[dict[str, float]]] = {one.system.name: [] for one in found}
    for number in range(args.rounds):
        turn = number % len(found)
        for one in found[turn:] + found[:turn]:
            try:
                felt = sample(one, logs, random.Random(number))
            except FAULTS as error:
                print(f"{one.system.name}: {error!r}", file=sys.stderr)
                continue
            samples[one.system.name].append(felt)
            say(f"{one.system.name}: {json.dumps({name: round(value, 2) for name, value in felt.items()})}")
            if args.out:
                Path(args.out).write_text(json.dumps(samples, indent=1) + "\n")
    if not any(samples.values()):
        sys.exit("no server was measured")
    print(f"\n{args.streams} streams, {args.input} tokens in, {args.output} out\n\n{table(samples)}")


if __name__ == "__main__":
    main()
