"""Cost of a hand-off between two worker processes, in time and bytes: first table of docs/benchmarks/handoff.md.

usage: handoff.py --cleave BIN --model FOLDER [--model FOLDER ...]

For each checkpoint: a router, a prefill and a decode worker as processes on loopback, sixteen prompts one after the
other, and the means of the decode worker's metrics of hand-offs. Prints Markdown. Standard library only. (The page's
table of transports is `cleave kv bench`.)
"""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

from servers import complete, metric, process, wait_for

PROMPTS = 16
PROMPT_TOKENS = 768


def handoffs(args: argparse.Namespace, model: str) -> dict[str, float]:
    """Means over the prompts of bytes and seconds."""
    with ExitStack() as stack:
        router = stack.enter_context(process(args.cleave, "router", "--listen", "127.0.0.1:0", "--placement", "split"))
        address = wait_for(router, r"listening on http://(\S+)")
        pages = {}
        for leg in ("prefill", "decode"):
            worker = stack.enter_context(
                process(args.cleave, "worker", "--leg", leg, "--router", address, "--model", model, "--threads", "1",
                        "--dtype", "bf16", "--no-prefix-cache", "--metrics-listen", "127.0.0.1:0")
            )
            pages[leg] = wait_for(worker, r"metrics are served url=http://([^/\s]+)")
            wait_for(worker, r"(joined a router)")
        complete(address, [1, 2, 3], 2)
        names = {
            "bytes": "cleave_worker_handoff_bytes_total",
            "seconds": "cleave_handoff_seconds_sum",
            "exposed": "cleave_handoff_exposed_seconds_sum",
        }
        before = {key: metric(pages["decode"], name) for key, name in names.items()}
        ttft_before = metric(address, "cleave_http_time_to_first_token_seconds_sum")
        for index in range(PROMPTS):
            complete(address, [3 + (index * 31 + i * 7) % 250 for i in range(PROMPT_TOKENS)], 8)
        after = {key: metric(pages["decode"], name) for key, name in names.items()}
        ttft = metric(address, "cleave_http_time_to_first_token_seconds_sum") - ttft_before
    means = {key: (after[key] - before[key]) / PROMPTS for key in names}
    return means | {"ttft": ttft / PROMPTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", action="append", required=True)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; means of {PROMPTS} prompts of {PROMPT_TOKENS} tokens\n")
    columns: list[tuple[str, dict[str, str]]] = []
    for model in args.model:
        means = handoffs(args, model)
        cells = {
            "KV handed over per prompt": f"{means['bytes'] / 2**20:.2f} MiB",
            "reserve to landed": f"{means['seconds'] * 1e3:.1f} ms",
            "of that not hidden behind prefill": f"{means['exposed'] * 1e3:.2f} ms",
            "time to first token": f"{means['ttft'] * 1e3:.1f} ms",
        }
        columns.append((Path(model).name, cells))
    print("| | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in columns[0][1]:
        print(f"| {name} | " + " | ".join(cells[name] for _, cells in columns) + " |")


if __name__ == "__main__":
    main()
