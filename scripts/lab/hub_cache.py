#!/usr/bin/env python3
"""Shares one cache of models between cleave and Python's huggingface_hub, in both directions.

usage: hub_cache.py --cleave BIN [--model FOLDER]

Needs Python with huggingface_hub. A hub on loopback has the model's files, and counts the downloads of each. Checked
are: a model that Python downloaded is served by name without the network; a model that cleave pulled is found by
Python without the network, and online with no further download; Python's scan of the cache finds no fault; a download
by cleave waits for Python's lock; `cleave rm` removes what Python downloaded. Prints a line for each, and exits with 1
at the first that fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from loopback_hub import NAME, Hub, checksum, start

ROOT = Path(__file__).resolve().parents[2]


class Pair:
    """Both clients with one cache."""

    def __init__(self, cleave: str, endpoint: str, cache: str) -> None:
        self.cleave = cleave
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.variables = kept | {"HF_HOME": cache, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(self, *words: str, **variables: str) -> str:
        environment = self.variables | variables
        done = subprocess.run([self.cleave, *words], env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise SystemExit(f"cleave {' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def python(self, code: str, **variables: str) -> str:
        command = [sys.executable, "-c", f"from huggingface_hub import *\n{code}"]
        done = subprocess.run(command, env=self.variables | variables, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise SystemExit(f"{code}: {done.stderr}")
        return done.stdout.strip()


def check(name: str, fits: bool, detail: object = "") -> None:
    print(f"{'ok' if fits else 'FAILED'}: {name} {detail}".rstrip())
    if not fits:
        raise SystemExit(1)


def python_first(pair: Pair) -> None:
    folder = pair.python(f"print(snapshot_download({NAME!r}))")
    said = pair.run("generate", "--model", NAME, "--prompt", "A", "--max-tokens", "3", "--json", HF_HUB_OFFLINE="1")
    check("cleave runs what Python downloaded, offline", bool(json.loads(said)))
    listed = json.loads(pair.run("list", "--json"))
    check("cleave lists it whole", [(one["name"], one["complete"], one["folder"]) for one in listed] == [(NAME, True, folder)])
    before = sum(Hub.downloads.values())
    pair.run("pull", NAME)
    check("a pull downloads nothing again", sum(Hub.downloads.values()) == before)
    pair.run("rm", NAME)
    scan = pair.python("print(len(scan_cache_dir().repos))")
    check("cleave removes it", scan == "0", scan)


def cleave_first(pair: Pair) -> None:
    folder = pair.run("pull", NAME)
    offline = pair.python(f"print(snapshot_download({NAME!r}))", HF_HUB_OFFLINE="1")
    check("Python finds what cleave downloaded, offline", offline == folder, offline)
    before = Hub.downloads.copy()
    pair.python(f"snapshot_download({NAME!r}, allow_patterns=['*.json', '*.safetensors'])")
    again = [file for file in Hub.downloads if Hub.downloads[file] > before[file] and before[file]]
    check("Python downloads none of it again", not again, again)
    scan = pair.python("s = scan_cache_dir(); print(len(s.repos), len(s.warnings), s.size_on_disk)")
    size = json.loads(pair.run("list", "--json"))[0]["bytes"]
    check("Python's scan has no warning, and the same size", scan == f"1 0 {size}", scan)


def locked(pair: Pair) -> None:
    """Holds Python's lock of one blob while cleave pulls; the pull ends after it is given back."""
    file = max(Hub.files, key=lambda name: len(Hub.files[name]) * name.endswith(".safetensors"))
    lock = Path(pair.variables["HF_HOME"], "hub/.locks/models--org--tiny", checksum(Hub.files[file]) + ".lock")
    lock.parent.mkdir(parents=True)
    code = f"from huggingface_hub.utils import WeakFileLock\nwith WeakFileLock({str(lock)!r}):\n print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    before = Hub.downloads[file]
    pull = subprocess.Popen([pair.cleave, "pull", NAME], env=pair.variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pull.wait(timeout=3)
        waited = False
    except subprocess.TimeoutExpired:
        waited = Hub.downloads[file] == before
    check("cleave waits for Python's lock", waited)
    holder.communicate("\n")
    check("and goes on after it", pull.wait(timeout=60) == 0 and Hub.downloads[file] == before + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", type=Path, default=ROOT / "testdata/llama3")
    arguments = parser.parse_args()
    endpoint = start(arguments.model)
    for part in (python_first, cleave_first, locked):
        with tempfile.TemporaryDirectory() as cache:
            part(Pair(arguments.cleave, endpoint, cache))


if __name__ == "__main__":
    main()
