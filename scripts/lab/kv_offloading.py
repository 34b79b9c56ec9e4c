"""Time to the first token of a long prefix: computed, in the pool, from host memory, from disk.

usage: kv_offloading.py --cleave BIN [--shape SHAPE] [--tokens N ...] [--rounds N] [--folder DIR]
                        [--kv-cache-dtype auto|int8_per_token_head]

Makes docs/benchmarks/kv-offloading.md. For each N (1024, 4096 and 8192) it starts one worker on a synthetic checkpoint,
whose pool has room for one prompt of N tokens and hardly more. Each prompt is computed, and asked for again at once.
Prompts take turns, so that each is lost before it comes again; the time to the first token is that of the whole answer
of one token. Then the server starts again, which leaves the disk alone, and its file is put out of the system's page
cache before each prompt. The floors are copies of as many bytes as the prefix has, in memory and from such a file. DIR
holds the file (default: a temporary folder). Prints Markdown. Standard library only.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from servers import complete, metric, process, read_on, wait_for

VOCABULARY = 30_000
BLOCK_TOKENS = 16
# Tokens that the pool has room for beside a prefix: its question, and a block or two.
SPARE_TOKENS = 64


def serve(stack: ExitStack, args: argparse.Namespace, model: str, folder: Path, pool: int) -> str:
    server = stack.enter_context(
        process(
            args.cleave, "serve", "--port", "0", "--model", model, "--dtype", "bf16", "--kv-cache", str(pool),
            "--kv-cache-dtype", args.kv_cache_dtype,
            "--kv-offloading-size", str(2 * (args.rounds + 1) * pool), "--kv-offloading-dir", str(folder),
            "--kv-offloading-dir-size", str(2 * (args.rounds + 1) * pool),
        )
    )
    address = wait_for(server, r"listening on http://(\S+)")
    read_on(server)
    return address


def first_token(address: str, prompt: list[int]) -> float:
    began = time.monotonic()
    complete(address, prompt, 1)
    return time.monotonic() - began


def settle(address: str) -> None:
    """Waits until every cached block is kept, also on disk."""
    before = -1.0
    while (kept := metric(address, "cleave_kv_tier_kept_blocks_total")) != before:
        before = kept
        time.sleep(0.5)


def forget_pages(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def floors(folder: Path, size: int) -> tuple[float, float]:
    """Seconds to copy so many bytes in memory, and to read them from a file of the folder."""
    source, target = bytearray(os.urandom(1 << 20) * (size >> 20)), bytearray(size >> 20 << 20)
    copies = []
    for _ in range(5):
        began = time.monotonic()
        memoryview(target)[:] = source
        copies.append(time.monotonic() - began)
    with tempfile.NamedTemporaryFile(dir=folder.parent) as file:
        file.write(source)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        with open(file.name, "rb", buffering=0) as again:
            view, read = memoryview(target), 0
            while count := again.readinto(view[read : read + (1 << 20)]):
                read += count
        disk = time.monotonic() - began
    return min(copies), disk


def synthesize(args: argparse.Namespace, home: Path) -> tuple[str, int]:
    """Returns the checkpoint's folder, and the bytes of KV of one token."""
    model = f"{home}/model"
    subprocess.run([args.cleave, "synth", "--shape", args.shape, "--out", model], check=True, capture_output=True)
    with open(f"{model}/config.json") as file:
        config = json.load(file)
    # Random weights were trained for no context, so any limit holds.
    config["max_position_embeddings"] = max(args.tokens) + 1024
    with open(f"{model}/config.json", "w") as file:
        json.dump(config, file)
    heads = config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # int8: a byte a value and a scale of four bytes a head; else two bytes a value.
    head = {"auto": 2 * width, "int8_per_token_head": width + 4}[args.kv_cache_dtype]
    return model, config["num_hidden_layers"] * 2 * heads * head


def measure(args: argparse.Namespace, model: str, folder: Path, tokens: int, token_bytes: int) -> str:
    """A line of the table."""
    prefix = tokens * token_bytes
    pool = prefix + SPARE_TOKENS * token_bytes
    dice = random.Random(tokens)
    prompts = [[dice.randrange(3, VOCABULARY) for _ in range(tokens + 8)] for _ in range(args.rounds + 1)]
    times: dict[str, list[float]] = {"computed": [], "pool": [], "host": [], "disk": []}
    blocks, failures = 0.0, 0.0
    with ExitStack() as life:
        address = serve(life, args, model, folder, pool)
        for place, prompt in enumerate(prompts):
            times["computed"].append(first_token(address, prompt))
            times["pool"].append(first_token(address, prompt))
            settle(address)
            if place:
                times["host"].append(first_token(address, prompts[place - 1]))
                settle(address)
        blocks += metric(address, "cleave_kv_tier_fetched_blocks_total")
        failures += metric(address, "cleave_kv_tier_failures_total")
    with ExitStack() as life:
        address = serve(life, args, model, folder, pool)
        for prompt in prompts:
            forget_pages(folder)
            times["disk"].append(first_token(address, prompt))
            settle(address)
        blocks += metric(address, "cleave_kv_tier_fetched_blocks_total")
        failures += metric(address, "cleave_kv_tier_failures_total")
    asked = tokens // BLOCK_TOKENS * (len(times["host"]) + len(times["disk"]))
    memory, disk = floors(folder, prefix)
    cold = statistics.median(times["computed"])
    cells = [f"{tokens} tokens, {prefix / 1e6:.0f} MB", f"{cold * 1e3:.0f} ms"]
    for place, floor in [("pool", None), ("host", memory), ("disk", disk)]:
        median = statistics.median(times[place])
        alone = f", copy alone {floor * 1e3:.0f}" if floor else ""
        cells.append(f"{median * 1e3:.0f} ms ({cold / median:.0f}x{alone})")
    cells.append(f"{blocks:.0f} of {asked}" + (f", {failures:.0f} failures" if failures else ""))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8_per_token_head"])
    args = parser.parse_args()
    kv = "" if args.kv_cache_dtype == "auto" else f", keys and values in {args.kv_cache_dtype}"
    print(f"{args.shape} in bf16{kv}, {os.cpu_count()} cores; medians of {args.rounds} or {args.rounds + 1}\n")
    print("| prefix | computed | in the pool | from host memory | from disk | blocks that came back |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as home:
        model, token_bytes = synthesize(args, Path(home))
        for tokens in args.tokens:
            print(measure(args, model, Path(home) / f"kv-{tokens}", tokens, token_bytes), flush=True)


if __name__ == "__main__":
    main()
