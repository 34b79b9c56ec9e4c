"""Runs the chart on a real control plane: installs, loads, scales, kills, rolls, drains and removes it.

usage: check.py --cleave BIN --binaries FOLDER [--quick] [--only NAME ...] [--markdown FILE] [--record] [--keep]

etcd, kube-apiserver and kube-controller-manager 1.20.2 (scripts/ci/plane/build.sh) run in namespaces of their own; pods
are processes of BIN in network namespaces, with the root, user and volumes that the chart sets (kubelet.py). Real
parts: the controllers of Deployments, ReplicaSets, endpoints, HPAs, budgets; Helm's engine, which installs, upgrades,
tests and removes; every process of Cleave. Emulated parts: the kubelet, the addresses and names of Services, KEDA's
operator (keda.py). The chart is changed in four lines for 1.20 (world.OF_1_20). Engines compute nothing but take a
device's time, so that load scales pools on two cores; the first release runs the bundled model. Network policies and
resource limits are stored, not enforced.

Prints a row for each event when it is over; exits with 1 if the outcome of one differs from the expected one. Needs
root and nft; all that the script makes ends with it. `--quick` leaves out events that take a minute of load or of
waiting. `--markdown` writes the table to a file, `--record` to results.json, from which table.py makes the table in
docs/benchmarks/kubernetes-events.md. `--keep` keeps the logs, as a failure does.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSIDE = "CLEAVE_PLANE_INSIDE"
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "openssl")


def enter() -> None:
    """Continues in new namespaces: all that is left at the end of the script ends with them."""
    if os.environ.get(INSIDE):
        return
    if os.geteuid() != 0 or not shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin"):
        print("SKIPPED: the control plane's test needs root and nft (Debian: nftables)")
        sys.exit(0)
    if missing := [each for each in PROGRAMS if not shutil.which(each)]:
        print(f"SKIPPED: the control plane's test needs {', '.join(missing)}")
        sys.exit(0)
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        print("SKIPPED: the control plane's test needs namespaces of its own, which are not allowed here")
        sys.exit(0)
    os.environ[INSIDE] = "1"
    os.execvp("unshare", [*own, sys.executable, *sys.argv])


enter()
from events import EVENTS, Stage
from table import RESULTS, head, row


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cleave", required=True, type=Path)
    arguments.add_argument("--binaries", required=True, type=Path)
    arguments.add_argument("--only", nargs="+", choices=[event.name for event in EVENTS], help="these, and what they need")
    arguments.add_argument("--markdown", type=Path, help="write the table there too")
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--record", action="store_true")
    arguments.add_argument("--keep", action="store_true")
    said = arguments.parse_args()
    if said.quick and said.only:
        arguments.error("--quick and --only both choose events: give one of them")
    if said.record and (said.quick or said.only):
        arguments.error("--record is for all events: the table in docs/benchmarks is made of it")
    folder = Path(tempfile.mkdtemp(prefix="cleave-plane-"))
    print("\n".join(head()), flush=True)
    rows: list[tuple[list[str], float]] = []
    failed = 0
    stage = Stage(said.cleave.resolve(), said.binaries.resolve(), folder)
    try:
        for event in EVENTS:
            left_out = event.slow if said.quick else said.only and event.name not in said.only
            if left_out and not event.needed:
                continue
            begun = time.monotonic()
            try:
                seen = event.run(stage)
                trouble = stage.fault()
            except Exception as error:
                trouble = "; ".join(filter(None, [f"{type(error).__name__}: {error}", stage.fault()]))
            if trouble:
                failed += 1
                seen = f"**not so**: {trouble}".replace("\n", " ").replace("|", "/")
            rows.append(([event.title, event.expected, seen], round(time.monotonic() - begun, 1)))
            print(row(*rows[-1]), flush=True)
            if failed and event.needed or stage.fault():
                break
    finally:
        stage.end()
        if said.keep or failed:
            print(f"logs are in {folder}")
        else:
            shutil.rmtree(folder)
    if said.markdown:
        said.markdown.write_text("\n".join(head() + [row(*one) for one in rows]) + "\n")
    if said.record and not failed:
        RESULTS.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "events": rows}, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
