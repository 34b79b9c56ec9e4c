"""Reads hardware counters of kernels by Nsight Compute. usage: counters.py --bundle FOLDER [--limit S] [--tiny]

Runs a lab under ncu once for each kernel, with a launch or two counted, and writes a `counter` record each: shares of
the peak of memory and of the multiprocessors, of the tensor pipe, and resident warps. The card's clocks are left alone.
A record says so if ncu is missing or may not read counters. Standard library only.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import record
import tools

# Kernels in the order of their importance.
KERNELS = [
    "matmul_few8_bf16",
    "attend_decode_bf16_128",
    "matmul_cluster192_bf16",
    "matmul_cluster128_bf16",
    "attend_prefill_bf16_128",
    "matmul_few32_bf16",
    "matmul_few64_bf16",
    "matmul_many64_bf16",
    "matmul_many128_bf16",
    "matmul_few16_bf16",
    "norm_bf16",
    "silu_gate_bf16",
    "rotate_bf16",
    "sample_draw",
]
# The lab that launches the kernel, if it is not `operations`.
LABS = {"norm_bf16": "norm", "silu_gate_bf16": "gate", "rotate_bf16": "rotate", "sample_draw": "sample"}
METRICS = {
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "multiprocessors": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "seconds": "gpu__time_duration.sum",
}
NANOSECOND = 1e-9


def parse(text: str, kernel: str) -> list[dict]:
    """Returns the rows of ncu's CSV, of which each has one metric of one launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict] = {}
    for row in csv.DictReader(lines):
        name = next((name for name, metric in METRICS.items() if metric == row["Metric Name"]), None)
        if name is None:
            continue
        amount = float(row["Metric Value"].replace(",", ""))
        scale = {"nsecond": NANOSECOND, "ns": NANOSECOND, "usecond": 1e-6, "us": 1e-6, "%": 0.01}.get(row["Metric Unit"], 1.0)
        launches.setdefault(row["ID"], {"kernel": kernel})[name] = amount * scale
    return list(launches.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=20, help="seconds for one kernel")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    args = parser.parse_args()
    ncu = tools.find("ncu", args.bundle)
    if ncu is None:
        record.put("absent", what="hardware counters", why="ncu is not on this machine")
        print("ncu is not on this machine")
        sys.exit(record.ABSENT)
    failures = 0
    for kernel in KERNELS:
        program = [str(args.bundle / "labs" / LABS.get(kernel, "operations")), "--tiny" if args.tiny else "--brief"]
        options = ["--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
        options += ["--kernel-name", f"regex:^{kernel}$", "--launch-skip", "4", "--launch-count", "2", "--kill", "yes"]
        try:
            done = subprocess.run([ncu, *options, *program], capture_output=True, text=True, timeout=args.limit)
            found, why = parse(done.stdout, kernel), (done.stderr or done.stdout).strip()[-300:]
        except subprocess.TimeoutExpired:
            found, why = [], f"longer than {args.limit:g} s"
        for one in found:
            record.put("counter", **one)
        if not found:
            failures += 1
            record.put("skipped", system="ncu", model=kernel, shape="", why=why or "was not launched")
            print(f"{kernel}: {why}", file=sys.stderr)
            # Three kernels without counters mean a missing permission, which later kernels lack too.
            if failures == 3 and kernel == KERNELS[2]:
                break
    if failures == len(KERNELS) or failures == 3 and not found:
        sys.exit(1)


if __name__ == "__main__":
    main()
