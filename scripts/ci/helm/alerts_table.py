"""Writes the table of alerts in the guide on observability from the chart's rules.

usage: alerts_table.py [--check]

Every alert of rules.yaml has one line each for `alert`, `for`, `labels` and `summary`. With --check nothing is written.
Exit status 1: the guide differs, or a line of an alert is missing. Standard library only.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "helm/cleave/files/rules.yaml"
PAGE = ROOT / "docs/guides/observability.md"
BEGIN, END = "<!-- alerts: begin, by scripts/ci/helm/alerts_table.py -->", "<!-- alerts: end -->"
ALERT = re.compile(r"\s*- (?:alert|record): (\w\S*)")
FIELD = re.compile(r"\s*(for|labels|summary): (.+)")
NUMBERS = {"humanizePercentage": "N %", "humanizeDuration": "N s"}


def plain(summary: str) -> str:
    """Replaces a template's labels by their names in capitals, and its value by N with its unit."""
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), summary.strip("'"))
    return re.sub(r"\{\{ \$value(?: \| (\w+)[^}]*)? \}\}", lambda value: NUMBERS.get(value[1], "N"), summary)


def rows(text: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the fields of every alert by its name, in the file's order."""
    found: list[tuple[str, dict[str, str]]] = []
    for line in text.splitlines():
        if rule := ALERT.match(line):
            found.append((rule[1], {}))
        elif found and (field := FIELD.match(line)):
            found[-1][1][field[1]] = field[2]
    # Names of recording rules have colons.
    return [(name, fields) for name, fields in found if ":" not in name]


def table(text: str) -> str:
    lines = ["| alert | severity | after | meaning |", "|---|---|---|---|"]
    for name, fields in rows(text):
        severity = re.fullmatch(r"\{severity: (\w+)\}", fields.get("labels", ""))
        if not severity or not {"for", "summary"} <= set(fields):
            sys.exit(f"{RULES.name}: {name} has no severity, duration or summary on a line of its own")
        lines.append(f"| `{name}` | {severity[1]} | {fields['for']} | {plain(fields['summary'])} |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    now = f"{before}{BEGIN}\n{table(RULES.read_text())}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if now != text:
            print(f"{PAGE.relative_to(ROOT)} is not what {RULES.name} says: run scripts/ci/helm/alerts_table.py")
        return int(now != text)
    PAGE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
