"""Measures the cost of a hand-off between prefill and decode legs on one GPU.

usage: legs.py --cleave BIN --model FOLDER --name NAME [--device cuda] [--prompts N] [--prompt-tokens N]
               [--kv-cache SIZE] [--shares S,S,…]

The legs run as two workers of one process (`cleave serve --prefill 1 --decode 1 --placement split`), once for each
share of the multiprocessors that decode may use (`none`: undivided), and as three processes, which take turns on the
GPU without MPS. One client sends prompts one after the other; the workers' metrics have the time of the hand-off of a
prompt's KV, and the part of it that prefill did not hide. Then several clients send at once, for the time between
tokens beside prefill. Writes `handoff` records. Standard library only.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import record

# Metrics of the decode side alone: a process with both legs also has the lines of the prefill side.
METRICS = {
    "bytes": r'cleave_worker_handoff_bytes_total\{[^}]*role="decode",kind="received"[^}]*\}',
    "count": r'cleave_handoff_seconds_count\{[^}]*role="decode"[^}]*\}',
    "seconds": r'cleave_handoff_seconds_sum\{[^}]*role="decode"[^}]*\}',
    "exposed_seconds": r'cleave_handoff_exposed_seconds_sum\{[^}]*role="decode"[^}]*\}',
}


class Process:
    """A child process whose lines can be waited for."""

    def __init__(self, *command: str) -> None:
        quiet = os.environ | {"RUST_LOG": "warn,cleave=info"}
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet)
        self.lines: list[str] = []
        self.changed = threading.Condition()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in self.child.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, pattern: str, limit: float) -> str:
        until = time.monotonic() + limit
        with self.changed:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found.group(1)
                left = until - time.monotonic()
                if left <= 0 or self.child.poll() is not None:
                    raise RuntimeError(f"never said {pattern}: {''.join(self.lines)[-1500:]}")
                self.changed.wait(min(left, 1))


@contextmanager
def running(*command: str):
    process = Process(*command)
    try:
        yield process
    finally:
        process.child.terminate()
        try:
            process.child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.child.kill()
            process.child.wait()


def metrics(address: str) -> dict[str, float]:
    page = urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read().decode()
    return {key: sum(map(float, re.findall(rf"^{name} (\S+)$", page, re.MULTILINE))) for key, name in METRICS.items()}


def tokens_of(address: str, prompt: list[int], new_tokens: int) -> list[float]:
    """Returns the time of each token in seconds after the request's start."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    form = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), form)
    begin, times = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                times.append(time.perf_counter() - begin)
    return times


def prompt_of(number: int, tokens: int) -> list[int]:
    return [3 + (number * 9973 + index * 7 + number * index) % 250 for index in range(tokens)]


def measure(arrangement: str, address: str, page: str, args: argparse.Namespace) -> None:
    tokens_of(address, prompt_of(999, args.prompt_tokens), 4)
    before = metrics(page)
    def ask(number: int) -> list[float]:
        return tokens_of(address, prompt_of(number, args.prompt_tokens), args.new_tokens)

    alone = [ask(number) for number in range(args.prompts)]
    after = metrics(page)
    found = {key: after[key] - before[key] for key in METRICS}
    handed = max(found["count"], 1)
    with ThreadPoolExecutor(args.clients) as pool:
        numbers = range(1000, 1000 + 2 * args.clients)
        together = list(pool.map(ask, numbers))
    gaps = sorted(b - a for times in together for a, b in zip(times[1:], times[2:]))
    record.put(
        "handoff",
        model=args.name,
        arrangement=arrangement,
        prompt_tokens=args.prompt_tokens,
        handoffs=found["count"],
        bytes_each=found["bytes"] / handed,
        seconds_each=found["seconds"] / handed,
        exposed_seconds_each=found["exposed_seconds"] / handed,
        first_token_seconds=statistics.median(times[0] for times in alone),
        token_seconds=statistics.median(b - a for times in alone for a, b in zip(times[1:], times[2:])),
        clients=args.clients,
        first_token_seconds_together=statistics.median(times[0] for times in together),
        token_seconds_together=statistics.median(gaps),
        token_seconds_together_p99=gaps[len(gaps) * 99 // 100],
    )


def one_process(args: argparse.Namespace, engine: list[str], share: str) -> None:
    command = [args.cleave, "serve", "--port", "0", "--prefill", "1", "--decode", "1", "--placement", "split", *engine]
    with running(*command, "--gpu-decode-share", share) as server:
        address = server.wait_for(r"listening on http://(\S+)", args.start_limit)
        measure(f"two workers of one process, decode share {share}", address, address, args)


def processes(args: argparse.Namespace, engine: list[str]) -> None:
    with ExitStack() as stack:
        router = stack.enter_context(running(args.cleave, "router", "--listen", "127.0.0.1:0", "--placement", "split"))
        address = router.wait_for(r"listening on http://(\S+)", 20)
        workers = {
            leg: stack.enter_context(
                running(args.cleave, "worker", "--leg", leg, "--router", address, "--metrics-listen", "127.0.0.1:0", *engine)
            )
            for leg in ("prefill", "decode")
        }
        pages = [worker.wait_for(r"metrics are served url=http://([^/\s]+)", args.start_limit) for worker in workers.values()]
        for worker in workers.values():
            worker.wait_for(r"(joined a router)", args.start_limit)
        measure("three processes", address, pages[1], args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache", default="8GiB")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--calibrate", default="2")
    parser.add_argument("--start-limit", type=float, default=60)
    parser.add_argument("--shares", type=lambda text: text.split(","), default=["0.4", "none", "0.3", "0.55"])
    args = parser.parse_args()
    engine = ["--device", args.device, "--model", args.model, "--dtype", "bf16", "--no-prefix-cache"]
    engine += ["--kv-cache", args.kv_cache, "--calibrate", args.calibrate]
    failed = False
    arrangements = {f"share {share}": partial(one_process, share=share) for share in args.shares}
    for name, arrangement in (arrangements | {"processes": processes}).items():
        try:
            arrangement(args, engine)
        except Exception as error:  # A failure of one arrangement does not stop the others.
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
            record.put("skipped", system="cleave", model=args.name, shape=f"legs, {name}", why=str(error)[-300:])
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
