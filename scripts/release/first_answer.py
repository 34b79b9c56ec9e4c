"""Starts `cleave serve` below a root, with nothing else of the machine's files if the root is not /, and asks for one
completion. Run it in a network namespace: it brings up loopback there. With MODEL, a folder, the server gets the model
by name from a hub on loopback, into an empty cache.

usage: first_answer.py ROOT PROGRAM [MODEL]
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
import loopback_hub

LIMIT_S = 120
# That of the image.
USER = 65532


def main() -> None:
    root, program, *model = sys.argv[1:]
    is_isolated = root != "/"
    if is_isolated:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as models:
        named, variables = [], {}
        if model:
            named = ["--model", loopback_hub.NAME]
            variables = {"HF_HOME": models, "HF_ENDPOINT": loopback_hub.start(Path(model[0]))}
        ask(root, program, named, variables)


def ask(root: str, program: str, named: list[str], variables: dict[str, str]) -> None:
    is_isolated = root != "/"
    cache = os.path.join(root, "var/cache/cleave") if is_isolated else os.environ.get("TMPDIR", "/tmp")
    if not os.path.exists(cache):
        os.makedirs(cache)
        os.chown(cache, USER, USER)
    server = subprocess.Popen(
        [program if not is_isolated else "/" + program, "serve", "--port", "0", *named],
        stdout=subprocess.PIPE,
        text=True,
        env={"XDG_CACHE_HOME": "/var/cache/cleave" if is_isolated else cache, "PATH": "/usr/bin:/bin"} | variables,
        preexec_fn=(lambda: enter(root)) if is_isolated else None,
    )
    try:
        line = server.stdout.readline()
        assert line.startswith("listening on "), "the server did not start"
        port = int(line.rsplit(":", 1)[1])
        body = json.dumps({"prompt": "A vector is", "max_tokens": 8, "ignore_eos": True})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        assert json.loads(text)["usage"]["completion_tokens"] == 8, text
    finally:
        server.terminate()
        assert server.wait(LIMIT_S) == 0, "a signal ends the server in good order"


def enter(root: str) -> None:
    """The root of the new process; it has /proc, as a container does."""
    os.makedirs(os.path.join(root, "proc"), exist_ok=True)
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


if __name__ == "__main__":
    main()
