"""Memory that request bodies cost a server: its peak and the rest afterwards, of a real `cleave serve`.

usage: request_bodies.py --cleave BIN --model FOLDER [--mib N] [--at-once N]

Checks the bounds of docs/design/threat-model.md (`--body-memory`, `--template-memory`); its table is in
docs/benchmarks/request-bodies.md. Bodies of N MiB (7.9), N of them at once (4), by kind: nested arrays under a key that
is not read, tiny chat messages, one long message, a prompt of token ids. Prints Markdown: resident memory before, at
its peak and five seconds after, and the statuses of the answers. Standard library only.
"""

import argparse
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter

MIB = 1 << 20


def filled(before: str, item: str, after: str, size: int) -> bytes:
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def kinds(size: int) -> dict[str, tuple[str, bytes]]:
    message = '{"role":"user","content":"%s"}'
    long = "word " * ((size - 100) // 5)
    chat, text = "/v1/chat/completions", "/v1/completions"
    nested = "[" * 100 + "]" * 100
    return {
        "nested arrays, unknown key": (text, filled('{"prompt":"a","max_tokens":1,"zzz":[', nested, "]}", size)),
        "empty objects, unknown key": (text, filled('{"prompt":"a","max_tokens":1,"zzz":[', "{}", "]}", size)),
        "tiny messages": (chat, filled('{"messages":[', message % "", "]}", size)),
        "one long message": (chat, ('{"messages":[' + message % long + "]}").encode()),
        "token ids": (text, filled('{"prompt":[', "1", "]}", size)),
    }


def resident(pid: int) -> float:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / MIB


def ask(url: str, body: bytes, statuses: Counter) -> None:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            statuses[answer.status] += 1
    except urllib.error.HTTPError as error:
        error.read()
        statuses[error.code] += 1


def measure(cleave: str, model: str, at_once: int, route: str, body: bytes) -> tuple[float, float, float, Counter]:
    command = [cleave, "serve", "--model", model, "--host", "127.0.0.1", "--port", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        seen = ""
        while (found := re.search(r"http://127\.0\.0\.1:\d+", seen)) is None:
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start:\n{seen}")
            seen += line
        url = found.group(0)
        threading.Thread(target=child.stdout.read, daemon=True).start()
        while True:
            try:
                urllib.request.urlopen(url + "/ready", timeout=10).read()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        ask(url + "/v1/completions", b'{"prompt":"a","max_tokens":1}', Counter())
        before = peak = resident(child.pid)
        statuses: Counter = Counter()
        clients = [threading.Thread(target=ask, args=(url + route, body, statuses)) for _ in range(at_once)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            peak = max(peak, resident(child.pid))
            time.sleep(0.002)
        time.sleep(5)
        return before, peak, resident(child.pid), statuses
    finally:
        child.terminate()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mib", type=float, default=7.9)
    parser.add_argument("--at-once", type=int, default=4)
    args = parser.parse_args()
    print("| body | at once | before, MiB | peak | after | statuses |\n|---|---|---|---|---|---|")
    for name, (route, body) in kinds(int(args.mib * MIB)).items():
        for at_once in (1, args.at_once):
            before, peak, after, statuses = measure(args.cleave, args.model, at_once, route, body)
            shown = json.dumps(dict(sorted(statuses.items())))
            print(f"| {name} | {at_once} | {before:.0f} | {peak:.0f} | {after:.0f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
