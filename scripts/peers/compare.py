"""Cleave's engine and llama.cpp on the same checkpoint, cores and precision, interleaved.

usage: compare.py --cleave BIN --llama-bench BIN --hf FOLDER --gguf FILE [--threads N] [--rounds N] [--out FILE]

Each round runs one after the other; the table has the median and the best of the rounds, because
machines are shared and noisy. Tokens per second; higher is better.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess


def llama(args: argparse.Namespace) -> dict[str, float]:
    command = [args.llama_bench, "-m", args.gguf, "-t", str(args.threads), "-r", "1", "-o", "json", "-fa", "1"]
    found = {}
    for flags in (["-p", "512", "-n", "0"], ["-p", "0", "-n", "32", "-d", "128"]):
        rows = json.loads(subprocess.run(command + flags, check=True, capture_output=True, text=True).stdout)
        for row in rows:
            found["prefill 512" if row["n_prompt"] else "decode b1, ctx 128"] = row["avg_ts"]
    return found


def cleave(args: argparse.Namespace) -> dict[str, float]:
    command = [args.cleave, "bench", "engine", "--model", args.hf, "--threads", str(args.threads)]
    command += ["--dtype", "bf16", "--rounds", "1", "--json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["name"]: row["tokens_per_second_median"] for row in json.loads(output)["rows"]}


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--hf", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write the samples as JSON")
    args = parser.parse_args()
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for engine, measure in (("cleave", cleave), ("llama.cpp", llama)):
            for name, speed in measure(args).items():
                samples.setdefault(name, {}).setdefault(engine, []).append(speed)
    print(f"{processor()}, {args.threads} threads, bf16, {args.rounds} interleaved rounds, tokens/s: median (best)\n")
    print("| | Cleave | llama.cpp | ratio of medians |\n|---|---|---|---|")
    for name, engines in samples.items():
        cells = [name]
        for engine in ("cleave", "llama.cpp"):
            speeds = engines.get(engine)
            cells.append(f"{statistics.median(speeds):.1f} ({max(speeds):.1f})" if speeds else "")
        if len(engines) == 2:
            cells.append(f"{statistics.median(engines['cleave']) / statistics.median(engines['llama.cpp']):.2f}")
        else:
            cells.append("")
        print("| " + " | ".join(cells) + " |")
    if args.out:
        with open(args.out, "w") as file:
            json.dump(samples, file, indent=1)


if __name__ == "__main__":
    main()
