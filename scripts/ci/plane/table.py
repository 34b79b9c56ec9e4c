"""The table of events on a control plane in docs/benchmarks/kubernetes-events.md, from the last run that was recorded.

usage: table.py [--check]

check.py --record writes results.json beside this script; this script writes its table into the page, or compares
them with --check. Exit status 1: they differ. Standard library only.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[2] / "docs/benchmarks/kubernetes-events.md"
RESULTS = HERE / "results.json"
BEGIN, END = "<!-- plane: begin, by scripts/ci/plane/table.py -->", "<!-- plane: end -->"


def row(event: list[str], seconds: float) -> str:
    return f"| {' | '.join(event)} | {seconds:.1f} |"


def head() -> list[str]:
    return ["| event | expected | seen | s |", "|---|---|---|---|"]


def main() -> int:
    lines = head() + [row(event, seconds) for event, seconds in json.loads(RESULTS.read_text())["events"]]
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    table = "\n".join(lines)
    now = f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv[1:]:
        if now != text:
            print(f"{PAGE.name} is not what scripts/ci/plane/results.json says: run scripts/ci/plane/table.py")
        return int(now != text)
    PAGE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
