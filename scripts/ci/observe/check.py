"""Evaluates the dashboard and the rules in a real Prometheus that scrapes a server under load, and lints each metric.

usage: $(scripts/ci/helm/install_tools.sh FOLDER) scripts/ci/observe/check.py --cleave BIN [--seconds N]

Starts `cleave serve` with the legs apart and a policy, `cleave bench run` against it, and Prometheus (Debian's package)
on loopback. While the server meets its targets no alert may even be pending; then some requests have targets that
cannot be met, and every panel, recording rule and variable must return data. promtool lints the metrics. Exits with 1
and a line for each flaw; prints SKIPPED without Prometheus.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts/ci/helm"))

import metrics  # noqa: E402

# A healthy server without an autoscaler lacks these series.
NONE_EXPECTED = {"cleave_workers_wanted"}
# Alerts of a healthy server that are accepted: two workers share the processor here, which no forecast knows.
EXCUSED = {"CleaveForecastsOff"}
POLICY = """
default_class: chat
classes:
  - name: chat
    ttft: 60s
    tpot: 10s
    e2e: 120s
"""


def wait_for(what: str, ready: Callable[[], object], seconds: float = 60) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.2)
    sys.exit(f"waited {seconds} s for {what}")


def patiently(flaws: Callable[[], list[str]], seconds: float) -> list[str]:
    """Returns the flaws left after the seconds: a rate needs two scrapes."""
    deadline = time.monotonic() + seconds
    while (found := flaws()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def ask(url: str, path: str, **query: str) -> dict | None:
    try:
        with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        # Prometheus answers in plain text until it has read its data.
        return json.load(error) if "json" in error.headers.get("content-type", "") else None
    except OSError:
        return None


def serve(cleave: str, folder: Path) -> tuple[subprocess.Popen, str]:
    """Runs a server with the legs apart; yields its address."""
    (folder / "policy.yaml").write_text(POLICY)
    log = folder / "serve.log"
    legs = ["--prefill", "1", "--decode", "2", "--placement", "split"]
    with log.open("w") as out:
        command = [cleave, "serve", "--port", "0", "--policy", str(folder / "policy.yaml"), *legs]
        server = subprocess.Popen(command, stdout=out, stderr=out)
    address = wait_for("the server", lambda: re.search(r"listening on http://(\S+)", log.read_text()))
    return server, address[1]


def watch(folder: Path, target: str) -> tuple[subprocess.Popen, str]:
    """Runs a Prometheus that scrapes the server each second and evaluates the rules; yields its address."""
    rules = folder / "rules.yaml"
    rules.write_text(metrics.unscoped((metrics.FILES / "rules.yaml").read_text()))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "cleave", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("w") as out:
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        command += ["--web.listen-address=127.0.0.1:0", "--log.level=info"]
        prometheus = subprocess.Popen(command, stdout=out, stderr=out)
    listening = r'Listening on" address=(127\.0\.0\.1:[1-9]\d*)'
    address = wait_for("Prometheus", lambda: re.search(listening, log.read_text()))
    return prometheus, f"http://{address[1]}"


def load(cleave: str, target: str, seconds: int, more: list[str]) -> None:
    """Sends requests with a common prefix, five each second."""
    command = [cleave, "bench", "run", f"--url=http://{target}", "--workload=short-short:input=64,output=16,prefix=32"]
    command += ["--rate=5", f"--duration={seconds}s", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}")


def asked(expression: str) -> str:
    """Returns an expression as Grafana sends it for all values of its variables, over a short window."""
    short = metrics.unscoped(expression).replace("$__rate_interval", "20s")
    return re.sub(rf"\$({'|'.join(metrics.variables())})\b", ".*", short)


def empty_variables(prometheus: str) -> list[str]:
    """Lists variables of the dashboard that offer nothing; a Prometheus outside of Kubernetes has no namespaces."""
    found = []
    for name, query in metrics.variables().items():
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
        answer = ask(prometheus, f"/api/v1/label/{label}/values", **{"match[]": asked(series)}) or {}
        if name != "namespace" and not answer.get("data"):
            found.append(f"variable {name}: no value for {query}")
    return found


def unanswered(prometheus: str) -> list[str]:
    """Lists panels and recording rules that return nothing, or an error."""
    found = []
    places = metrics.panels() | {rule["record"]: rule["expr"] for rule in metrics.rules() if "record" in rule}
    for place, expression in places.items():
        answer = ask(prometheus, "/api/v1/query", query=asked(expression)) or {}
        if answer.get("status") != "success":
            found.append(f"{place}: {answer.get('error', 'no answer')}")
        elif not answer["data"]["result"] and not any(name in expression for name in NONE_EXPECTED):
            found.append(f"{place}: no data for {expression}")
    return found


def troubled(prometheus: str) -> list[str]:
    """Lists rules with an error, and alerts that a healthy server raises."""
    groups = (ask(prometheus, "/api/v1/rules") or {})["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    found = [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]
    return found + [
        f"{rule['name']} is {rule['state']}" for rule in rules if rule.get("alerts") and rule["name"] not in EXCUSED
    ]


def linted(target: str) -> list[str]:
    """Returns promtool's complaints of the metrics, but for colons in the names of other systems."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        kind, text = answer.headers["content-type"], answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    found = [line for line in said if not re.fullmatch(r"vllm:\S+ metric names should not contain ':'", line)]
    return found + ([] if kind.startswith("text/plain; version=0.0.4") else [f"/metrics is {kind} for who asks for nothing"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True, help="the binary")
    parser.add_argument("--seconds", type=int, default=25, help="of load")
    args = parser.parse_args()
    if not shutil.which("prometheus"):
        print("SKIPPED: there is no Prometheus (Debian's package prometheus)")
        return 0
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            server, target = serve(str(Path(args.cleave).resolve()), folder)
            processes.append(server)
            prometheus, url = watch(folder, target)
            processes.append(prometheus)
            wait_for(
                "a scrape",
                lambda: (ask(url, "/api/v1/query", query="cleave_flights") or {}).get("data", {}).get("result"),
            )
            load(args.cleave, target, args.seconds, ["--goal=1"])
            flaws = troubled(url)
            # No worker gives a first token within a microsecond, so these requests are refused, with a reason.
            load(args.cleave, target, 3, ["--slo=ttft=1us", "--slo-headers=targets"])
            flaws += patiently(lambda: unanswered(url) + empty_variables(url), 10)
            flaws += linted(target)
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)
    for flaw in flaws:
        print(f"FLAW: {flaw}")
    print(
        f"{len(flaws)} flaws in {len(metrics.panels())} expressions of the dashboard and {len(metrics.rules())} rules, of a loaded server"
    )
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
