"""Goodput of simulated fleets (docs/benchmarks/goodput.md), and the cost of the router's brain (router.md).

usage: simulated_goodput.py --cleave BIN [--mooncake FILE] [--devices 8 64 1024] [--seconds 5]
                            [--search-seconds 3 | --no-search] [--json FILE]

The production brains in a world of priced devices (`cleave sim goodput`): every way to route gets the same arrivals, of
a mixture of chats, documents and agents, and, if its file is given, of Mooncake's conversation trace with its shared
prefixes. Then, for short and long prompts with short and long answers on eight devices, the highest rate at which nine
of ten requests meet their targets. Prints Markdown. Standard library only.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

TARGETS = ["--ttft", "500ms", "--tpot", "40ms"]
MIX = ["--workload", "chat=0.5*short-long,document=0.2*long-short,agent=0.3*long-long"]
# Rates to search from, per device: about half of what the fleet bears, which saves tries.
QUADRANTS = {"short-short": 150, "short-long": 60, "long-short": 13, "long-long": 12}
SEARCHED = ["auto", "split", "aggregated", "load-split", "load-aggregated"]
SEARCH_DEVICES = 8
# Prompts of twelve thousand tokens in the mean.
TRACE_TARGETS = ["--ttft", "3s", "--tpot", "40ms"]


def ask(args: argparse.Namespace, *words: str) -> dict:
    command = [args.cleave, "sim", "goodput", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def table(args: argparse.Namespace, name: str, words: list[str], per_device: float) -> list[dict]:
    rows = []
    for devices in args.devices:
        rate = str(per_device * devices)
        found = ask(args, *words, "--devices", str(devices), "--rate", rate, "--duration", f"{args.seconds}s", "--compare")
        rows.append({"workload": name, "devices": devices, "rate_per_device": per_device, **found})
        print(f"{name}: {devices} devices done", file=sys.stderr)
    ways = [row["way"] for row in rows[0]["rows"]]
    print(f"\n{name}, {per_device:g} requests per second offered to each device: good ones per second and device"
          " (share of all that met their targets)\n")
    print("| devices | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for row in rows:
        scores = [way["score"] for way in row["rows"]]
        cells = [(score["goodput_per_device"], score["all"]["attainment"]) for score in scores]
        best = max(good for good, _ in cells)
        shown = [f"{good:.2f} ({share:.1%})" for good, share in cells]
        shown = [f"**{text}**" if good == best else text for text, (good, _) in zip(shown, cells)]
        print(f"| {row['devices']} | " + " | ".join(shown) + " |")
    return rows


def search(args: argparse.Namespace) -> list[dict]:
    rows = []
    ways = [word for way in SEARCHED for word in ("--way", way)]
    for quadrant, per_device in QUADRANTS.items():
        words = ["--workload", quadrant, "--devices", str(SEARCH_DEVICES), "--rate", str(per_device * SEARCH_DEVICES),
                 "--duration", f"{args.search_seconds}s", "--search", *ways]
        found = ask(args, *words, *TARGETS)
        rows.append({"workload": quadrant, **found})
        print(f"search: {quadrant} done", file=sys.stderr)
    names = [row["way"] for row in rows[0]["rows"]]
    print(f"\nHighest rate at which nine of ten requests meet their targets, {SEARCH_DEVICES} devices, arrivals for"
          f" {args.search_seconds:g} s: good ones per second and device (requests per second offered to each device)\n")
    print("| prompt-answer | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        # A way that bears no rate has no score.
        cells = [(way["score"]["goodput_per_device"], way["rate"]) if "score" in way else (0.0, 0.0) for way in row["rows"]]
        best = max(good for good, _ in cells)
        shown = [f"{good:.2f} ({rate / SEARCH_DEVICES:.2f})" for good, rate in cells]
        shown = [f"**{text}**" if good == best else text for text, (good, _) in zip(shown, cells)]
        print(f"| {row['workload']} | " + " | ".join(shown) + " |")
    return rows


def cost(args: argparse.Namespace) -> list[dict]:
    rows = []
    for devices in args.devices:
        words = ["--devices", str(devices), "--rate", str(28 * devices), "--duration", "2s", "--router-cost"]
        found = ask(args, *MIX, *TARGETS, *words)
        rows.append({"devices": devices, **found["rows"][0]["router"]})
        print(f"router: {devices} devices done", file=sys.stderr)
    print("\nThe router's brain, choosing per request:\n")
    names = [name for name in rows[0] if name != "devices"]
    print("| devices | " + " | ".join(name.replace("_", " ") for name in names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        print(f"| {row['devices']} | " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--mooncake", help="conversation_trace.jsonl or .jsonl.gz")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--seconds", type=float, default=5, help="how long requests arrive")
    parser.add_argument("--search-seconds", type=float, default=3, help="the same for each try of a search")
    parser.add_argument("--no-search", action="store_true", help="leave the highest rates out")
    parser.add_argument("--json", help="where the numbers go too")
    args = parser.parse_args()
    found = {"goodput": [], "search": [], "router": []}
    for per_device in (28, 40):
        found["goodput"] += table(args, "Mixture", MIX + TARGETS, per_device)
    if args.mooncake:
        words = ["--trace", args.mooncake, "--arrivals", "poisson", *TRACE_TARGETS]
        found["goodput"] += table(args, "Mooncake", words, 4)
    if not args.no_search:
        found["search"] = search(args)
    found["router"] = cost(args)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
