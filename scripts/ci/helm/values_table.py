"""Writes the table of values in the chart's README from the comments of values.yaml.

usage: values_table.py [--check]

Every value's comment begins with `# --`, and may go on in lines that begin with `# `; a key without one is a map of
values. With --check nothing is written.
Exit status 1: the README differs, or a value has no comment. Standard library only.
"""

import re
import sys
from pathlib import Path

CHART = Path(__file__).resolve().parents[3] / "helm/cleave"
BEGIN, END = "<!-- values: begin, by scripts/ci/helm/values_table.py -->", "<!-- values: end -->"


def rows(text: str) -> list[tuple[str, str, str]]:
    """Returns (path, default, meaning) of every value with a comment."""
    found: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    meaning, inside = "", -1
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if told := re.match(r"\s*# -- (.*)", line):
            meaning = told[1]
            continue
        if meaning and (more := re.match(r"\s*# (.*)", line)):
            meaning += " " + more[1]
            continue
        key = re.match(r"\s*([\w./-]+):(?: (.*))?$", line)
        if not line.strip() or line.lstrip().startswith("#") or (inside >= 0 and indent > inside):
            continue
        inside = -1
        if not key:
            continue
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, key[1]))
        if meaning:
            # Lines below a value that has a comment are its default, unless they have comments too.
            found.append((".".join(name for _, name in path), key[2] or "see file", meaning))
            meaning, inside = "", indent
        elif key[2]:
            sys.exit(f"values.yaml: {'.'.join(name for _, name in path)} has no comment")
    return found


def table(text: str) -> str:
    lines = ["| value | default | |", "|---|---|---|"]
    for path, default, meaning in rows(text):
        lines.append(f"| `{path}` | `{default}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def main() -> int:
    readme = CHART / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    now = f"{before}{BEGIN}\n{table((CHART / 'values.yaml').read_text())}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if now != text:
            print("helm/cleave/README.md is not what values.yaml says: run scripts/ci/helm/values_table.py")
        return int(now != text)
    readme.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
