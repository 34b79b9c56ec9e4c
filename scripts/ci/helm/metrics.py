"""Checks expressions of dashboard and rules against the series that Cleave has, and rules with promtool.

Owns: finding the names in PromQL and on the page of metrics; the tests of alerts. Never: queries a running
Prometheus (scripts/ci/observe does).
"""

import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "testdata/alerts/alerts.yaml"
FILES = ROOT / "helm/cleave/files"
PAGE = ROOT / "docs/metrics.md"
GUIDE = ROOT / "docs/guides/observability.md"
# Labels that a variable of the dashboard may have another name for.
LABELS = {"model_name": "model"}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


@functools.cache
def registered() -> dict[str, set[str]]:
    """Returns the labels of series on the generated page by their names, without the suffix of counters."""
    rows = re.findall(r"^\| `([a-z_0-9:]+)` \| \w+ \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return {name.removesuffix("_total"): set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def known_as(name: str) -> str | None:
    """Returns the name under which the page has a series, or None."""
    known = registered()
    plain = (name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix))
    return next((one for one in plain if one in known), None)


def unscoped(expression: str) -> str:
    """Returns the rules without the placeholder for a namespace."""
    return re.sub(r",?\$scope", "", expression)


def panels() -> dict[str, str]:
    """Returns the dashboard's expressions by panel and target."""
    board = json.loads((FILES / "dashboard.json").read_text())
    return {
        f"panel {panel['title']}, {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }


def rules() -> list[dict]:
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def flaws() -> list[str]:
    """Lists names of series that the program does not have, rules without a namespace, and alerts without texts."""
    found = unfiltered() + misquoted()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = panels() | {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    for place, expression in expressions.items():
        for name in re.findall(r"\b(?:cleave|vllm|sglang)[_:][a-z_0-9:]+", re.sub(r'"[^"]*"', "", expression)):
            if name not in recorded and not known_as(name):
                found.append(f"{place}: nothing has {name}")
    for rule in rules():
        if "$scope" not in rule["expr"]:
            found.append(f"{rule.get('alert') or rule['record']}: looks at other namespaces too")
        said = set(rule.get("annotations", {}))
        if "alert" in rule and (said != {"summary", "description", "runbook"} or "severity" not in rule["labels"]):
            found.append(f"{rule['alert']}: without summary, description, runbook or severity")
    return found


def variables() -> dict[str, str]:
    """Returns the queries of the dashboard's variables by their names, but for the data source."""
    board = json.loads((FILES / "dashboard.json").read_text())
    return {one["name"]: one["definition"] for one in board["templating"]["list"] if one["type"] == "query"}


def unfiltered() -> list[str]:
    """Lists selectors of the dashboard that ignore a variable, or filter by a label that their series lack."""
    found, filters = [], set(variables())
    for place, expression in panels().items():
        for name, selector in re.findall(r"\b((?:cleave|vllm)[_:][a-z_0-9:]+)(?:\{([^}]*)\})?", expression):
            labels = {"namespace"} | registered().get(known_as(name) or "", set())
            wanted = {(label, LABELS.get(label, label)) for label in labels if LABELS.get(label, label) in filters}
            if set(re.findall(r'(\w+)=~"\$(\w+)"', selector)) != wanted:
                found.append(f"{place}: {name} has {selector}, and the variables for its labels are {sorted(wanted)}")
    return found


def misquoted() -> list[str]:
    """Runs the guide's command for a Prometheus without an operator; its rules must be those of the chart."""
    command = re.search(r"^sed .*rules\.yaml(?= *>)", GUIDE.read_text(), re.MULTILINE)
    if not command:
        return [f"{GUIDE.name} has no command for the rules"]
    made = subprocess.run(command[0], shell=True, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    theirs = unscoped((FILES / "rules.yaml").read_text())
    return [] if made == theirs and "$scope" not in made else [f"{GUIDE.name}: `{command[0]}` does not make the rules"]


def promtool(rendered: dict) -> str | None:
    """Returns promtool's complaints about the rules of a PrometheusRule, empty if none; None without promtool."""
    if not shutil.which("promtool"):
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(rendered["spec"], file)
        file.flush()
        done = subprocess.run(["promtool", "check", "rules", file.name], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def unraised() -> list[str]:
    """Lists alerts without test series, alerts that their series do not raise, and alerts that the series of `never`
    raise."""
    cases = yaml.safe_load(ALERTS.read_text())
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    found = [f"{name}: in the rules or in {ALERTS.name} alone" for name in alerts ^ set(cases)]
    for name in sorted(alerts & set(cases)):
        case = cases[name]
        if raised(name, case["series"], case["at"]) is not True:
            found.append(f"{name}: not raised by what should raise it")
        if raised(name, case["never"], case["at"]) is not False:
            found.append(f"{name}: raised by what comes close only")
    return found


def raised(alert: str, series: dict[str, str], at: str) -> bool:
    """Whether the alert fires at that time of a Prometheus that had these series."""
    if not all(isinstance(values, str) for values in series.values()):
        raise TypeError(f"{alert}: YAML takes a series for a number: {series}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(unscoped((FILES / "rules.yaml").read_text()))
        test = {
            "interval": "1m",
            "input_series": [{"series": key, "values": values} for key, values in series.items()],
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
        }
        whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
        (folder / "test.yaml").write_text(yaml.safe_dump(whole))
        command = ["promtool", "test", "rules", "test.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    # The test expects no alert, so promtool reports one that fires as a failure.
    if done.returncode != 0 and f"alertname: {alert}" not in said:
        raise ValueError(f"{alert}: {said}")
    return done.returncode != 0
