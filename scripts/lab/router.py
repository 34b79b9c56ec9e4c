"""Cost of the router: processor time for each request and added latency, with engines that compute nothing.

usage: router.py --cleave BIN [--seconds N] [--rate R] [--json FILE]

Makes the first table of docs/benchmarks/router.md. A router on processor 0; a prefill and a decode worker with mock
engines, and the load (`cleave bench run`), on processor 1: real processes, real HTTP and gRPC, KV of a few bytes. The
time that the router's threads used is read from /proc before and after each load, so that other work on the machine
hardly shows; the requests per second that one core bears follow from it. Latency is the client's: steps of prompts cost
nothing here, so router, worker, client and wires added all of the time to first token.

The latency that the router reports for itself (a request's reading, and its turns until the first token) is the sum of
two histograms' quantiles, each its bucket's upper bound (a quarter wide), and does not hold sockets and the system's
share of them. Two more numbers tell where the rest comes from: how busy the core of workers and clients was, where
every request queues five times (client, reservation, prompt, first token, client), and how long the router's threads
could run and had no core, which is zero where nothing else computes on it. One row has one request at a time: there
nothing queues.

Prints Markdown. Standard library only.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from servers import process, read_on, wait_for

# Steps of prompts cost nothing; tokens come every 10 ms, whatever the batch.
PRICES = {"rows": [[1, 10_000_000]], "pair_picos": 0, "context_picos": 0, "draw_nanos": 0, "link": [0, 0], "host": [0, 0]}
PREFILL_ROWS = [[1, 1]]
ROOM = {"devices": 1, "block_tokens": 64, "token_bytes": 1, "kv_tokens": 8_000_000, "context_tokens": 131_072,
        "slots": 4096, "step_tokens": 65_536}
ABOUT = {"about": "a device that costs the router's measurement nothing", "source": "made up"}


def profile(folder: str, leg: str) -> str:
    rows = {"rows": PREFILL_ROWS} if leg == "prefill" else {}
    path = Path(folder) / f"{leg}.json"
    path.write_text(json.dumps({"name": leg, **ABOUT, **ROOM, **PRICES, **rows}))
    return str(path)


def fleet(stack: ExitStack, args: argparse.Namespace, folder: str) -> tuple[str, int]:
    pinned = lambda core: ("taskset", "-c", core, args.cleave)
    router = stack.enter_context(process(*pinned(args.router_core), "router", "--listen", "127.0.0.1:0"))
    address = wait_for(router, r"listening on http://(\S+)")
    read_on(router)
    for leg in ("prefill", "decode"):
        worker = stack.enter_context(
            process(*pinned(args.load_core), "worker", "--engine", "mock", "--mock-profile", profile(folder, leg),
                    "--leg", leg, "--name", leg, "--router", address, "--max-queue", "16384")
        )
        wait_for(worker, r"(joined a router)")
        read_on(worker)
    return address, router.pid


def used(pid: int) -> tuple[float, float]:
    """Seconds of processor time so far: in the program, in the system for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def waited(pid: int) -> float:
    """Seconds so far in which threads were ready and had no core."""
    waits = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        # A thread may end between the two.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waits += int(path.read_text().split()[1])
    return waits / 1e9


def busy(core: str) -> tuple[int, int]:
    """Busy ticks of a processor so far, and all ticks."""
    line = re.search(rf"^cpu{core} (.*)$", Path("/proc/stat").read_text(), re.MULTILINE)
    ticks = list(map(int, line.group(1).split()[:8]))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


# The router's own histograms, both from a request's arrival to its first token's leave.
ADDED = ("cleave_request_read_seconds", "cleave_router_added_seconds")


def buckets(address: str) -> dict:
    """Cumulative buckets of each histogram of ADDED."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = {}
    for name in ADDED:
        lines = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\d+)', text, re.MULTILINE)
        found[name] = {float(bound): int(count) for bound, count in lines}
    return found


def added_ms(before: dict, after: dict, part: float) -> float:
    """The sum of the quantiles of the histograms of ADDED, in milliseconds."""
    bounds = 0.0
    for name in ADDED:
        counts = {bound: count - before[name].get(bound, 0) for bound, count in after[name].items()}
        enough = part * counts[float("inf")]
        bounds += min(bound for bound, count in counts.items() if count >= enough)
    return bounds * 1e3


def load(args: argparse.Namespace, address: str, row: dict) -> dict:
    with tempfile.TemporaryDirectory() as out:
        command = ["taskset", "-c", args.load_core, args.cleave, "bench", "run", "--url", f"http://{address}",
                   "--workload", f"short-short:input={row['input']},output={row['output']},cv=0",
                   "--arrivals", "poisson", "--rate", str(row["rate"]), "--duration", f"{row['seconds']}s",
                   "--prompt", row["prompt"], "--out", out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return json.loads((Path(out) / "result.json").read_text())["runs"][0]


def measure(args: argparse.Namespace, address: str, pid: int, row: dict) -> dict:
    before, waited_before, busy_before = used(pid), waited(pid), busy(args.load_core)
    told_before = buckets(address)
    run = load(args, address, row)
    user, system = (after - before for before, after in zip(before, used(pid)))
    worked, ticks = (after - before for before, after in zip(busy_before, busy(args.load_core)))
    summary, told = run["all"], buckets(address)
    requests = summary["done"]
    if requests == 0:
        sys.exit(f"nothing was answered: {summary}")
    seconds = (user + system) / requests
    return row | {
        "requests": requests,
        "failures": summary["failures"],
        "rate_seen": requests / run["took_s"],
        "core_seconds": seconds,
        "system_share": system / (user + system) if user + system else 0.0,
        "per_core": 1 / seconds if seconds else float("inf"),
        # A thread that ended meanwhile took its count along.
        "waited_ms": max(0.0, waited(pid) - waited_before) * 1e3 / requests,
        "load_core_busy": worked / max(ticks, 1),
        "added_ms": {f"p{part * 100:.0f}": added_ms(told_before, told, part) for part in (0.5, 0.99)},
        "ttft_ms": summary["ttft_ms"],
        "gap_ms": summary["gap_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--seconds", type=float, default=10, help="of each load")
    parser.add_argument("--rate", type=float, default=1000, help="requests per second of the shorter prompts")
    parser.add_argument("--router-core", default="0")
    parser.add_argument("--load-core", default="1")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--json", help="where the numbers go too")
    args = parser.parse_args()
    short = {"input": 1024, "output": 32, "prompt": "tokens", "seconds": args.seconds}
    long = {"input": 100_000, "output": 1, "seconds": args.seconds}
    rows = [
        {"name": "1k tokens in, 32 out, streamed", "rate": args.rate, **short},
        {"name": "the same at half the rate", "rate": args.rate / 2, **short},
        {"name": "1k tokens in, 1 out", "rate": args.rate, **short, "output": 1},
        {"name": "1k tokens in, 1 out, one at a time", "rate": 20, **short, "output": 1},
        {"name": "100k tokens in, 1 out", "rate": 5, "prompt": "tokens", **long},
        {"name": "100k tokens in as text, 1 out", "rate": 1, "prompt": "text", **long},
    ]
    rows = [row for row in rows if not args.only or args.only in row["name"]]
    results = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address, pid = fleet(stack, args, folder)
        measure(args, address, pid, rows[0] | {"seconds": 2, "rate": min(rows[0]["rate"], 100)})
        for row in rows:
            results.append(measure(args, address, pid, row))
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    print(f"{model.group(1) if model else platform.machine()}, {os.cpu_count()} cores\n")
    print("| load | offered, req/s | answered, req/s | core-seconds per request | of that in the system | "
          "req/s that one core bears | router without a core, ms per request | other core busy | added p50, ms | added p99, ms | TTFT p50, ms | TTFT p99, ms |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in results:
        print(f"| {row['name']} | {row['rate']:g} | {row['rate_seen']:.0f} | {row['core_seconds']:.6f} | "
              f"{row['system_share']:.0%} | {row['per_core']:.0f} | {row['waited_ms']:.3f} | "
              f"{row['load_core_busy']:.0%} | {row['added_ms']['p50']:.2f} | {row['added_ms']['p99']:.2f} | "
              f"{row['ttft_ms']['p50']:.2f} | {row['ttft_ms']['p99']:.2f} |")
        if row["failures"]:
            print(f"\n{row['name']}: {row['failures']}\n", file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
