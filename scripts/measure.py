"""Engine speed, and what a hand-off between processes costs (docs/benchmarks/handoff.md).

usage: measure.py --cleave BIN --model FOLDER [--model FOLDER ...] [--rounds N]

For each checkpoint: `cleave bench engine` (load time, prefill and decode tokens per second), then a
router, a prefill and a decode worker as processes on loopback, sixteen prompts one after the other,
and what the decode worker's metrics say of their hand-offs. Prints Markdown. Standard library only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROMPTS = 16
PROMPT_TOKENS = 768


@contextmanager
def process(*command: str):
    """A child whose output lines can be waited for; ended on leaving."""
    # Few log lines: they fit the pipe although nobody reads on after the line that was waited for.
    quiet = os.environ | {"RUST_LOG": "warn,cleave=info"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet)
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def wait_for(child: subprocess.Popen, pattern: str) -> str:
    for line in child.stdout:
        if found := re.search(pattern, line):
            return found.group(1)
    sys.exit(f"ended before it said {pattern}")


def metric(address: str, name: str) -> float:
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def complete(address: str, prompt: list[int], max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request).read()


def handoffs(args: argparse.Namespace, model: str) -> dict[str, float]:
    """Means over the prompts."""
    with ExitStack() as stack:
        router = stack.enter_context(process(args.cleave, "router", "--listen", "127.0.0.1:0", "--placement", "split"))
        address = wait_for(router, r"listening on http://(\S+)")
        pages = {}
        for leg in ("prefill", "decode"):
            worker = stack.enter_context(
                process(args.cleave, "worker", "--leg", leg, "--router", address, "--model", model, "--threads", "1",
                        "--dtype", "bf16", "--no-prefix-cache", "--metrics-listen", "127.0.0.1:0")
            )
            pages[leg] = wait_for(worker, r"metrics at http://([^/\s]+)")
            wait_for(worker, r"(joined a router)")
        complete(address, [1, 2, 3], 2)
        names = {
            "bytes": "cleave_handoff_bytes_total",
            "seconds": "cleave_handoff_seconds_sum",
            "exposed": "cleave_handoff_exposed_seconds_sum",
        }
        before = {key: metric(pages["decode"], name) for key, name in names.items()}
        ttft_before = metric(address, "cleave_time_to_first_token_seconds_sum")
        for index in range(PROMPTS):
            complete(address, [3 + (index * 31 + i * 7) % 250 for i in range(PROMPT_TOKENS)], 8)
        after = {key: metric(pages["decode"], name) for key, name in names.items()}
        ttft = metric(address, "cleave_time_to_first_token_seconds_sum") - ttft_before
    means = {key: (after[key] - before[key]) / PROMPTS for key in names}
    return means | {"ttft": ttft / PROMPTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rounds", default="3")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; medians of {args.rounds} rounds; hand-offs: means of {PROMPTS} prompts of {PROMPT_TOKENS} tokens\n")
    names: list[str] = []
    columns: list[tuple[str, dict[str, str]]] = []
    for model in args.model:
        bench = [args.cleave, "bench", "engine", "--model", model, "--dtype", "bf16", "--rounds", args.rounds, "--json"]
        table = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)
        cells = {"load": f"{table['load_seconds']:.2f} s"}
        for row in table["rows"]:
            cells[f"{row['name']}, tokens/s"] = f"{row['tokens_per_second_median']:.0f}"
        means = handoffs(args, model)
        cells["hand-off, bytes"] = f"{means['bytes'] / 2**20:.2f} MiB"
        cells["hand-off, reserve to landed"] = f"{means['seconds'] * 1e3:.1f} ms"
        cells["of that not hidden behind prefill"] = f"{means['exposed'] * 1e3:.2f} ms"
        cells["time to first token"] = f"{means['ttft'] * 1e3:.1f} ms"
        names += [name for name in cells if name not in names]
        columns.append((Path(model).name, cells))
    print("| | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(cells.get(name, "") for _, cells in columns) + " |")


if __name__ == "__main__":
    main()
