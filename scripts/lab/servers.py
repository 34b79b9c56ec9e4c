"""Processes of Cleave for the measurements of this folder: starts, waits, requests for completions and metrics.

Owns: the start and the end of a process. Never: measures. Standard library only.
"""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager


@contextmanager
def process(*command: str):
    """A child whose output lines can be waited for. It ends with the block."""
    # Few log lines: they fit the pipe even if no reader follows the line that was waited for (see `read_on`).
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


def read_on(child: subprocess.Popen) -> None:
    """Drains the output after the last line that was waited for, because a full pipe stops the child."""
    threading.Thread(target=child.stdout.read, daemon=True).start()
