"""Runs an hour of load with a fault a minute, and lists growth, leaks and failures: docs/benchmarks/faults.md.

usage: soak.py --cleave BIN [--minutes N] [--share PART] [--ttft MS] [--tpot MS] [--cpu N] [--json FILE] [--keep DIR]

Two routers, two prefill and two decode workers on the bundled checkpoint, each a process, and Cleave's own load
generator. First it looks for the highest rate at which nine of ten requests meet the targets; then it sends that rate
times the share for the whole time. Each minute one process is killed, stopped, drained, given another leg, or given
another policy. No fault hits two of the workers and the router that serves, so that their memory shows whether it
grows. Every minute all of them report what they hold; after the load nothing may be held, leaked or under way.

Exit status 1: a request failed, an end was not clean, a block is held, or memory grew between the first and the last
quarter by more than a twentieth and the allowance for allocators. `--cpu` keeps the fleet to one core, and the load
generator to the others. Prints Markdown. Standard library only.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

WORKLOAD = "short-long:input=96,output=192,prefix=32"
# Context of the bundled checkpoint, in tokens.
CONTEXT = 1024
# Seconds of silence after which a worker is given up.
SILENCE = 5
LIMIT = 60.0
# Kinds of blocks that must be empty when nothing is under way; cached blocks are free for any sequence.
HELD = ("held", "swapped", "reserved", "leased", "quarantined", "leaked")
# Memory that allocators may keep after it was freed.
ALLOCATED_MIB = 2.0
POLICY = "classes: [{{name: all, ttft: {ttft}ms, tpot: {tpot}ms, queue_max: 512}}]\n"


def wait_until(what: str, probe: Callable[[], bool], limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not probe():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {limit} s")
        time.sleep(0.05)


class Process:
    """A child with its log in a file."""

    def __init__(self, log: Path, cpus: set[int], *command: str) -> None:
        self.log, self.from_byte = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self.child = subprocess.Popen(command, stdout=out, stderr=out)
        os.sched_setaffinity(self.child.pid, cpus)

    def said(self, pattern: str) -> str:
        found: list[str] = []

        def probe() -> bool:
            text = self.log.read_bytes()[self.from_byte :].decode(errors="replace")
            if self.child.poll() is not None:
                raise RuntimeError(f"{self.log.name} ended before it said {pattern}: {text[-2000:]}")
            found[:] = re.findall(pattern, text)
            return bool(found)

        wait_until(pattern, probe)
        return found[0]

    def tell(self, number: int) -> None:
        self.child.send_signal(number)

    def memory(self) -> int:
        """Resident bytes without pools of blocks, which workers map from each other as links come and go."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) * 1024

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as answer:
        return answer.read().decode()


def metric(text: str, name: str, label: str = "") -> float:
    lines = re.findall(rf"^{name}({{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


class Fleet:
    """Two routers that share four workers."""

    WORKERS = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}

    def __init__(self, cleave: str, folder: Path, cpus: set[int]) -> None:
        self.cleave, self.folder, self.cpus = cleave, folder, cpus
        self.policy = folder / "policy.yaml"
        self.policy.write_text("classes: [{name: all}]\n")
        self.all: dict[str, Process] = {}
        self.pages: dict[str, str] = {}
        # Exit statuses that were not clean, with the name of the process.
        self.unclean: list[str] = []
        self.addresses: list[str] = []
        for name in ("r0", "r1"):
            self.start_router(name, "127.0.0.1:0")
        self.addresses = [self.pages["r0"], self.pages["r1"]]
        for name in self.WORKERS:
            self.start_worker(name)
        self.wait_whole()

    def start_router(self, name: str, listen: str) -> None:
        self.all[name] = Process(
            self.folder / f"{name}.log", self.cpus, self.cleave, "router", "--listen", listen, "--placement", "split",
            "--worker-silence", str(SILENCE), "--policy", str(self.policy),
        )
        self.pages[name] = self.all[name].said(r"listening on http://(\S+)")

    def start_worker(self, name: str) -> None:
        self.all[name] = Process(
            self.folder / f"{name}.log", self.cpus, self.cleave, "worker", "--name", name, "--leg", self.WORKERS[name],
            "--router", ",".join(self.addresses), "--threads", "1", "--kv-cache", "64MiB",
            "--worker-silence", str(SILENCE), "--metrics-listen", "127.0.0.1:0",
        )
        self.pages[name] = self.all[name].said(r"metrics are served url=http://([^/\s]+)")

    def admin(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.addresses[0]}/admin/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.load(answer)

    def wait_whole(self) -> None:
        def whole() -> bool:
            there = {each["name"]: (each["role"], each["state"]) for each in self.admin("workers")["data"]}
            return all(there.get(name) == (leg, "ready") for name, leg in self.WORKERS.items())

        wait_until("whole fleet", whole)

    def lost(self, name: str) -> None:
        wait_until(f"loss of {name}", lambda: all(each["name"] != name for each in self.admin("workers")["data"]))

    def left(self, name: str, expected: int) -> None:
        status = self.all[name].child.wait(LIMIT)
        if status != expected:
            self.unclean.append(f"{name} ended with {status}")

    def end(self) -> None:
        for name in (*self.WORKERS, "r1", "r0"):
            self.all[name].tell(signal.SIGTERM)
            self.left(name, 0)

    # === faults: each function returns when the fleet is whole again ===

    def killed(self, name: str) -> None:
        self.all[name].tell(signal.SIGKILL)
        self.left(name, -signal.SIGKILL)
        self.start_worker(name)

    def stopped(self, name: str) -> None:
        self.all[name].tell(signal.SIGSTOP)
        self.lost(name)
        self.all[name].tell(signal.SIGCONT)

    def ended(self, name: str) -> None:
        self.all[name].tell(signal.SIGTERM)
        self.left(name, 0)
        self.start_worker(name)

    def drained(self, name: str) -> None:
        self.admin("drain", {"worker": name})
        self.left(name, 0)
        self.start_worker(name)

    def other_leg(self, name: str) -> None:
        role = lambda: {each["name"]: each["role"] for each in self.admin("workers")["data"]}.get(name)
        for leg in ("both", self.WORKERS[name]):
            self.admin("role", {"worker": name, "role": leg})
            wait_until(f"{name} as {leg}", lambda: role() == leg)

    def router_killed(self, name: str) -> None:
        self.all[name].tell(signal.SIGKILL)
        self.left(name, -signal.SIGKILL)
        self.start_router(name, self.addresses[1])

    def policy_changed(self, name: str) -> None:
        """Gives the process another policy, a broken one, and the first again."""
        first = self.policy.read_text()
        for text in (first.replace("queue_max: 512", "queue_max: 511"), "classes: [{name: all, ttft: soon}]\n", first):
            looks = lambda: metric(page(self.pages[name]), "cleave_policy_reloads_total")
            before = looks()
            self.policy.write_text(text)
            self.all[name].tell(signal.SIGHUP)
            wait_until("look at the policy", lambda: looks() > before)

    def faults(self) -> Iterator[tuple[str, Callable[[str], None], str]]:
        """Yields the faults in turns, without end."""
        while True:
            yield "decode worker killed", self.killed, "d0"
            yield "prefill worker killed", self.killed, "p0"
            yield "decode worker stopped until given up", self.stopped, "d0"
            yield "decode worker told to end", self.ended, "d0"
            yield "policy changed, broken and mended", self.policy_changed, "r0"
            yield "prefill worker drained", self.drained, "p0"
            yield "decode worker given both legs and back", self.other_leg, "d0"
            yield "the other router killed", self.router_killed, "r1"
            yield "prefill worker stopped until given up", self.stopped, "p0"
            yield "decode worker drained", self.drained, "d0"
            yield "prefill worker given both legs and back", self.other_leg, "p0"
            yield "prefill worker told to end", self.ended, "p0"


class Load:
    """Runs Cleave's own load generator."""

    def __init__(self, cleave: str, address: str, folder: Path, cpus: set[int]) -> None:
        self.common = ("--url", f"http://{address}", "--workload", WORKLOAD, "--max-context", str(CONTEXT))
        self.cleave, self.folder, self.cpus = cleave, folder, cpus
        self.processes: list[Process] = []

    def start(self, name: str, *more: str) -> Process:
        out = self.folder / name
        self.processes.append(
            Process(self.folder / f"{name}.log", self.cpus, self.cleave, "bench", *more, *self.common, "--out", str(out))
        )
        return self.processes[-1]

    def done(self, name: str, process: Process) -> dict:
        if status := process.child.wait():
            raise RuntimeError(f"the load generator ended with {status}: {process.log.read_text()[-2000:]}")
        return json.loads((self.folder / name / "result.json").read_text())

    def run(self, name: str, *more: str) -> dict:
        return self.done(name, self.start(name, *more))


def soak(args: argparse.Namespace, folder: Path) -> dict:
    cores = os.sched_getaffinity(0)
    fleet_cores = cores if args.cpu is None else {args.cpu}
    fleet = Fleet(args.cleave, folder, fleet_cores)
    load = Load(args.cleave, fleet.addresses[0], folder, (cores - fleet_cores) or cores)
    try:
        return measure(args, fleet, load)
    finally:
        for one in (*fleet.all.values(), *load.processes):
            one.child.kill()


def measure(args: argparse.Namespace, fleet: Fleet, load: Load) -> dict:
    slo = ("--slo", f"ttft={args.ttft}ms,tpot={args.tpot}ms")
    found = load.run("capacity", "goodput", *slo, "--goal", "0.9", "--rate", "10", "--duration", "20s")
    capacity = found["goodput"]["rate_max"]
    rate = args.share * capacity
    print(f"capacity: {capacity:.2f} requests/s; load: {rate:.2f}", file=sys.stderr, flush=True)
    # The policy's refusals are expected; one because of a full queue is not.
    fleet.policy.write_text(POLICY.format(ttft=args.ttft, tpot=args.tpot))
    fleet.all["r0"].tell(signal.SIGHUP)

    began = time.monotonic()
    process = load.start("soak", "run", *slo, "--rate", f"{rate:.4f}", "--duration", f"{args.minutes}m")
    faults, struck, samples = fleet.faults(), Counter(), []
    for minute in range(1, args.minutes + 1):
        wait_until("minute", lambda: time.monotonic() - began > 60 * minute - 30, 120)
        name, strike, whom = next(faults)
        at = time.monotonic()
        strike(whom)
        fleet.wait_whole()
        struck[name] += 1
        sample = {who: {"bytes": one.memory(), "files": one.files()} for who, one in fleet.all.items()}
        samples.append({"seconds": round(time.monotonic() - began, 1)} | sample)
        flights = metric(page(fleet.addresses[0]), "cleave_flights")
        size = " ".join(f"{who} {one['bytes'] / 2**20:.0f}/{one['files']}" for who, one in sample.items())
        print(f"{minute:>3} {name} ({whom}), whole after {time.monotonic() - at:.1f} s; {flights:.0f} flights; MiB/files: {size}",
              file=sys.stderr, flush=True)
    result = load.done("soak", process)
    return settle(fleet, result["runs"][0], samples) | {
        "minutes": args.minutes, "capacity_rps": capacity, "rate_rps": rate, "ttft_ms": args.ttft, "tpot_ms": args.tpot,
        "faults": dict(struck), "samples": samples,
    }


def settle(fleet: Fleet, run: dict, samples: list[dict]) -> dict:
    """The remains when nothing is under way, and after every process ended."""
    held = lambda: {
        (name, kind): count
        for name in fleet.WORKERS
        for kind in HELD
        if (count := metric(page(fleet.pages[name]), "cleave_pool_blocks", f'kind="{kind}"'))
    }
    with contextlib.suppress(TimeoutError):
        wait_until("blocks free", lambda: not held())
    blocks = {f"{name} {kind}": count for (name, kind), count in held().items()}
    router = page(fleet.addresses[0])
    passes = metric(router, "cleave_router_write_grants") + sum(metric(page(fleet.pages[name]), "cleave_worker_write_grants") for name in fleet.WORKERS)
    counters = {name: metric(router, f"cleave_{name}_total") for name in ("retries", "streams_resumed", "moves_done")}
    flights = metric(router, "cleave_flights")
    fleet.end()
    quarter = max(1, len(samples) // 4)
    memory = {}
    for name in ("r0", "p1", "d1"):
        sizes = [sample[name]["bytes"] / 2**20 for sample in samples]
        files = [sample[name]["files"] for sample in samples]
        memory[name] = {
            "first_mib": statistics.median(sizes[:quarter]), "last_mib": statistics.median(sizes[-quarter:]),
            "most_mib": max(sizes), "files_first": files[0], "files_last": files[-1],
        }
    return {"requests": run["all"], "errors": run["errors"], "blocks_held": blocks, "flights_left": flights, "passes_left": passes, "counters": counters,
            "memory": memory, "unclean_ends": fleet.unclean}


def wrong(seen: dict) -> list[str]:
    """Lists the faults that fail a soak."""
    said = [f"{who} ended uncleanly" for who in seen["unclean_ends"]]
    said += [f"{count:.0f} blocks: {what}" for what, count in seen["blocks_held"].items()]
    if failures := seen["requests"]["failures"]:
        said.append(f"requests failed: {failures}, {seen['errors']}")
    if unfinished := seen["requests"]["missed"].get("unfinished"):
        said.append(f"{unfinished} requests never ended")
    if seen["flights_left"]:
        said.append(f"{seen['flights_left']:.0f} flights never ended")
    if seen["passes_left"]:
        said.append(f"{seen['passes_left']:.0f} passes of hand-offs that are over are kept")
    if seen["requests"]["attainment"] < 0.9:
        said.append(f"only {seen['requests']['attainment']:.1%} of the requests were within their targets")
    for who, size in seen["memory"].items():
        if size["files_last"] > 2 * size["files_first"]:
            said.append(f"{who} had {size['files_first']} files open, then {size['files_last']}")
        if size["last_mib"] > 1.05 * size["first_mib"] + ALLOCATED_MIB:
            said.append(f"{who} grew from {size['first_mib']:.1f} to {size['last_mib']:.1f} MiB")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.7, help="of the rate that meets the targets")
    parser.add_argument("--ttft", type=float, default=500, help="target, in milliseconds")
    parser.add_argument("--tpot", type=float, default=25, help="target, in milliseconds")
    parser.add_argument("--cpu", type=int, help="the fleet's core, on a machine that others use")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for logs and results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = soak(args, folder)
    said = wrong(seen)
    if args.json:
        args.json.write_text(json.dumps(seen, indent=1) + "\n")
    seen["requests"].pop("curves", None)
    print(json.dumps({name: value for name, value in seen.items() if name != "samples"}, indent=1))
    print("\n".join(said) or "nothing grew, leaked or failed")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
