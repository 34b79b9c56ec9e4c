"""Load time of weights, and memory of a server: first table of docs/benchmarks/loading.md.

usage: loading.py --cleave BIN --model DIR [--rounds N] [--folder DIR] [--kv-cache BYTES]

For each form of the weights (as they are, --quantize int8 and int4), in turn: loads without a packed cache and with one
that is there, files in the system's cache; and a server, asked until its KV cache is full, whose memory at its highest
(VmHWM) is compared with 1.1 times the packed weights, plus the KV cache, plus 200 MB. DIR holds the packed cache
(default: a temporary folder). Prints Markdown. Standard library only.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from servers import complete, process, read_on, wait_for

FORMS = {"as it is": [], "int8": ["--quantize", "int8"], "int4": ["--quantize", "int4"]}
PROMPTS, PROMPT_TOKENS = 64, 256
MB = 1e6


def load_seconds(args: argparse.Namespace, flags: list[str]) -> float:
    """Seconds to load the weights alone."""
    command = [args.cleave, "bench", "engine", "--model", args.model, "--json", "--rounds", "1", "--shapes", "prefill:16", *flags]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(answer)["weights_seconds"]


def memory(args: argparse.Namespace, flags: list[str]) -> dict[str, float]:
    """Bytes that a server took at most, and how many of them were pages of files at the end."""
    with ExitStack() as life:
        words = ["serve", "--port", "0", "--model", args.model, "--kv-cache", str(args.kv_cache), *flags]
        server = life.enter_context(process(args.cleave, *words))
        address = wait_for(server, r"listening on http://(\S+)")
        read_on(server)
        dice = random.Random(1)
        prompts = [[dice.randrange(3, 30_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        with ThreadPoolExecutor(8) as askers:
            list(askers.map(lambda prompt: complete(address, prompt, 8), prompts))
        lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    parser.add_argument("--kv-cache", type=int, default=256 << 20)
    args = parser.parse_args()
    for path in Path(args.model).iterdir():
        path.read_bytes()
    print("| weights | packed | load | from the packed cache | memory, packed here | of the cache | limit |")
    print("|---|---|---|---|---|---|---|")
    for name, flags in FORMS.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            cached = [*flags, "--packed-cache", folder]
            load_seconds(args, cached)
            packed = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            times: dict[str, list[float]] = {"packed": [], "found": []}
            for _ in range(args.rounds):
                times["packed"].append(load_seconds(args, flags))
                times["found"].append(load_seconds(args, cached))
            own, shared = memory(args, flags), memory(args, cached)
        cells = [name, f"{packed / MB:.0f} MB"]
        cells += [f"{statistics.median(each):.2f} s (best {min(each):.2f}, worst {max(each):.2f})" for each in times.values()]
        cells += [f"{each['VmHWM'] / MB:.0f} MB" for each in (own, shared)]
        limit = 1.1 * packed + args.kv_cache + 200 * MB
        print("| " + " | ".join([*cells, f"{limit / MB:.0f} MB"]) + " |", flush=True)


if __name__ == "__main__":
    main()
