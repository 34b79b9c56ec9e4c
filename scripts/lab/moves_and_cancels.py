"""Cost of moving and of cancelling a running sequence: last section of docs/benchmarks/faults.md.

usage: moves_and_cancels.py --cleave BIN [--shape SHAPE] [--streams N] [--seconds N] [--moves N]

Real processes on loopback.
1. The time from a client's leaving to free blocks on both pools, by how far the flight had come: N clients (64) ask,
   and leave after a random time; the router's `cleave_router_cancel_to_free_seconds` has the rest.
2. The pause that a client sees while its running sequence moves to another decode worker, in decode steps, for a
   context of about 4000 tokens: one stream on a synthetic checkpoint, moved to and fro by POST /admin/role; the
   router's `cleave_stream_pause_seconds` against the median gap of the others.

Prints Markdown. Standard library only.
"""

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress

from servers import process, read_on, wait_for

CONTEXT_TOKENS = 4000


def fleet(stack: ExitStack, cleave: str, legs: list[str], more: list[str]) -> str:
    router = stack.enter_context(process(cleave, "router", "--listen", "127.0.0.1:0", "--placement", "split"))
    address = wait_for(router, r"listening on http://(\S+)")
    read_on(router)
    for number, leg in enumerate(legs):
        worker = stack.enter_context(
            process(cleave, "worker", "--leg", leg, "--name", f"{leg}-{number}", "--router", address, *more)
        )
        wait_for(worker, r"(joined a router)")
        read_on(worker)
    return address


def page(address: str) -> str:
    return urllib.request.urlopen(f"http://{address}/metrics").read().decode()


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]


def quantile(buckets: list[tuple[float, float]], share: float) -> tuple[float, float]:
    """The bounds between which that share of the observations ends; cumulative buckets, ascending."""
    wanted, below = share * buckets[-1][1], 0.0
    for bound, count in buckets:
        if count >= wanted:
            return below, bound
        below = bound
    return below, float("inf")


def leaver(address: str, longest: float, until: float, seed: int) -> None:
    """Sends requests and leaves, again and again; a third of the times within the first milliseconds."""
    dice = random.Random(seed)
    host, port = address.split(":")
    while time.monotonic() < until:
        prompt = [3 + dice.randrange(250) for _ in range(dice.choice([8, 8, 32, 32, 400]))]
        body = json.dumps({"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        stays = dice.choice([dice.uniform(0, 0.004), dice.uniform(0, 0.05), dice.uniform(0, longest)])
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            connection.settimeout(0.01)
            leave = time.monotonic() + stays
            while time.monotonic() < min(leave, until + longest):
                try:
                    if not connection.recv(65536):
                        break
                except TimeoutError:
                    pass


def cancels(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        # Few slots and blocks, so that some requests wait for room.
        more = ["--threads", "1", "--kv-cache", "24MiB", "--max-num-batched-tokens", "64"]
        address = fleet(stack, args.cleave, ["prefill", "decode", "decode"], more)
        until = time.monotonic() + args.seconds
        threads = [
            threading.Thread(target=leaver, args=(address, 2.0, until, seed)) for seed in range(args.streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The blocks of the last cancelled flights are free when no flight is left.
        while sum(value for _, value in samples(page(address), "cleave_flights")):
            time.sleep(0.1)
        text = page(address)
    print(f"From the client's leaving to free blocks on both pools, {args.streams} streams, {args.seconds} s:\n")
    print("| the flight was | left | median | p99 |\n|---|---|---|---|")
    stages = sorted({labels["stage"] for labels, _ in samples(text, "cleave_router_cancel_to_free_seconds_count")})
    span = lambda pair: f"{pair[0] * 1e3:g} to {pair[1] * 1e3:g} ms"
    for stage in stages + ["any"]:
        buckets: dict[float, float] = {}
        for labels, count in samples(text, "cleave_router_cancel_to_free_seconds_bucket"):
            if stage in (labels["stage"], "any"):
                bound = float(labels["le"].replace("+Inf", "inf"))
                buckets[bound] = buckets.get(bound, 0) + count
        ordered = sorted(buckets.items())
        total = ordered[-1][1]
        if total:
            print(f"| {stage} | {total:.0f} | {span(quantile(ordered, 0.5))} | {span(quantile(ordered, 0.99))} |")
    print()


def command(address: str, path: str, body: dict) -> None:
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request).read()


def workers(address: str) -> dict[str, dict]:
    listed = json.load(urllib.request.urlopen(f"http://{address}/admin/workers"))
    return {worker["name"]: worker for worker in listed["data"]}


def moved(address: str) -> tuple[float, float]:
    """Counts the pauses for a move, and sums their seconds."""
    text = page(address)
    of = lambda name: sum(value for labels, value in samples(text, name) if labels.get("kind") == "migrated")
    return of("cleave_stream_pause_seconds_count"), of("cleave_stream_pause_seconds_sum")


class Stream:
    """One stream, and the time of each of its events."""

    def __init__(self, address: str, prompt: list[int], max_tokens: int):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"http://{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        self.times: list[float] = []
        self.last = ""
        self.response = urllib.request.urlopen(request)
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        with suppress(AttributeError, OSError, ValueError):  # closed from outside
            for line in self.response:
                if line.startswith(b"data: "):
                    self.times.append(time.monotonic())
                    self.last = line.decode().strip()

    def wait(self, events: int) -> bool:
        """Waits for so many more events; false if the stream ended before."""
        wanted = len(self.times) + events
        while len(self.times) < wanted:
            if not self.thread.is_alive():
                return False
            time.sleep(0.002)
        return True


def moves(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = f"{folder}/model"
        subprocess.run([args.cleave, "synth", "--shape", args.shape, "--out", model], check=True, capture_output=True)
        with open(f"{model}/config.json") as file:
            config = json.load(file)
        # Random weights were trained for no context, so any limit holds.
        config["max_position_embeddings"] = 2 * CONTEXT_TOKENS
        with open(f"{model}/config.json", "w") as file:
            json.dump(config, file)
        more = ["--model", model, "--threads", "1", "--dtype", "bf16", "--kv-cache", args.kv_cache]
        address = fleet(stack, args.cleave, ["prefill", "decode", "decode"], more)
        prompt = [3 + i * 7 % 250 for i in range(CONTEXT_TOKENS)]
        pauses: list[float] = []
        gaps: list[float] = []
        names = ["decode-1", "decode-2"]
        while len(pauses) < args.moves:
            stream = Stream(address, prompt, 2000)
            before = moved(address)
            if not stream.wait(30):
                sys.exit(f"the stream ended early: {stream.last}")
            gaps += [b - a for a, b in zip(stream.times[5:], stream.times[6:])]
            while len(pauses) < args.moves and stream.thread.is_alive():
                here = next((n for n in names if workers(address)[n]["load"]["sequences_running"]), None)
                if here is None:
                    break
                command(address, "/admin/role", {"worker": here, "role": "prefill"})
                while moved(address)[0] == before[0] and stream.thread.is_alive():
                    time.sleep(0.02)
                command(address, "/admin/role", {"worker": here, "role": "decode"})
                after = moved(address)
                if after[0] == before[0] + 1:
                    pauses.append(after[1] - before[1])
                before = after
                stream.wait(30)
            stream.response.close()
    step = statistics.median(gaps)
    print(f"A running sequence of about {CONTEXT_TOKENS} tokens ({args.shape}) moves to another decode worker:\n")
    print("| moves | decode step, median | pause, median | in steps | pause, longest |\n|---|---|---|---|---|")
    median = statistics.median(pauses)
    print(
        f"| {len(pauses)} | {step * 1e3:.1f} ms | {median * 1e3:.1f} ms | {median / step:.1f} | {max(pauses) * 1e3:.1f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--kv-cache", default="400MiB")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--moves", type=int, default=20)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores\n")
    if args.seconds:
        cancels(args)
    if args.moves:
        moves(args)


if __name__ == "__main__":
    main()
