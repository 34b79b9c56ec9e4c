"""Tables of docs/benchmarks/engines-cpu.md and servers-cpu.md, from the samples in results/.

usage: tables.py [--check]

engines.py, closed_loop.py and builds.py write samples with --out. A page has the table of a file of results/ between
lines that name the file. Without --check the script writes the tables there; with it, it names the tables that differ
from their samples. Exit status 1: a table differs, or a file of results/ has no table on any page. Standard library
only.
"""

import json
import re
import sys
from pathlib import Path

import builds
import closed_loop
import engines

HERE = Path(__file__).resolve().parent
PAGES = sorted((HERE.parents[2] / "docs/benchmarks").glob("*.md"))
TABLES = {"builds": builds.table, "engines": engines.table, "servers": closed_loop.table}
PLACE = re.compile(r"(<!-- measured: begin, scripts/lab/peers/results/((\w+)[\w.-]*\.json) by tables\.py -->\n).*?(<!-- measured: end -->)", re.DOTALL)


def main() -> int:
    check = "--check" in sys.argv[1:]
    wrong: list[str] = []
    placed: set[str] = set()

    def made_anew(place: re.Match) -> str:
        begin, file, kind, end = place.groups()
        placed.add(file)
        whole = begin + TABLES[kind](json.loads((HERE / "results" / file).read_text())) + "\n" + end
        if whole != place[0]:
            wrong.append(file)
        return whole

    for page in PAGES:
        text = page.read_text()
        now = PLACE.sub(made_anew, text)
        if text.count("<!-- measured: begin") != len(PLACE.findall(text)):
            print(f"{page.name} has a place for measured tables that tables.py cannot read")
            return 1
        if not check and now != text:
            page.write_text(now)
    lacking = sorted({path.name for path in (HERE / "results").glob("*.json")} - placed)
    for file in lacking:
        print(f"no page of docs/benchmarks has the table of scripts/lab/peers/results/{file}")
    if not check:
        return int(bool(lacking))
    for file in wrong:
        print(f"docs/benchmarks is not what scripts/lab/peers/results/{file} says: run scripts/lab/peers/tables.py")
    return int(bool(wrong or lacking))


if __name__ == "__main__":
    sys.exit(main())
