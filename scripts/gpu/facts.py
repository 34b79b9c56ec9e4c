"""Records the machine of a run. usage: facts.py --manifest FILE

Writes a `machine` record: the chip and its driver from nvidia-smi, the host, the versions of the peers' libraries, and
the build that is measured. Never changes a setting. Standard library only.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess

import record

QUERY = {
    "chip": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "memory_used": "memory.used",
    "power_limit": "power.limit",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock_max": "clocks.max.memory",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
    "link_generation": "pcie.link.gen.current",
    "link_generation_max": "pcie.link.gen.max",
    "link_width": "pcie.link.width.current",
    "persistence": "persistence_mode",
}
PACKAGES = ["torch", "transformers", "triton", "nvidia-cublas", "flashinfer-python"]


def card() -> dict[str, str]:
    """Returns facts of the first GPU, without fields that this driver does not know."""
    if not shutil.which("nvidia-smi"):
        record.put("absent", what="nvidia-smi", why="not on the PATH")
        return {}
    found = {}
    for name, field in QUERY.items():
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "-i", "0"]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode == 0:
            found[name] = told.stdout.strip()
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.processor())


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", required=True, help="manifest.json of the bundle")
    args = parser.parse_args()
    with open(args.manifest) as file:
        manifest = json.load(file)
    record.put(
        "machine",
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **card(),
        processor=processor(),
        cores=os.cpu_count(),
        host_memory_bytes=memory_bytes(),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()),
        versions=versions(),
        commit=manifest["commit"],
        is_modified=manifest["is_modified"],
    )


if __name__ == "__main__":
    main()
