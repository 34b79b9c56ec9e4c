"""The README's tables of engines and servers, from the samples that are kept in results/.

usage: tables.py [--check]

engines.py and closed_loop.py write samples with --out; those of results/ whose table the README has are between lines that name
the file. This puts the tables there, or says with --check which are not what their samples give. Exits with 1 if one is not.
Standard library only.
"""

import json
import re
import sys
from pathlib import Path

import closed_loop
import engines

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
TABLES = {"engines": engines.table, "servers": closed_loop.table}
PLACE = re.compile(r"(<!-- measured: begin, scripts/peers/results/((\w+)[\w.-]*\.json) by tables\.py -->\n).*?(<!-- measured: end -->)", re.DOTALL)


def main() -> int:
    wrong = []

    def made_anew(place: re.Match) -> str:
        begin, file, kind, end = place.groups()
        whole = begin + TABLES[kind](json.loads((HERE / "results" / file).read_text())) + "\n" + end
        if whole != place[0]:
            wrong.append(file)
        return whole

    text = README.read_text()
    now = PLACE.sub(made_anew, text)
    if text.count("<!-- measured: begin") != len(PLACE.findall(text)):
        print("README.md has a place for measured tables that tables.py cannot read")
        return 1
    if "--check" not in sys.argv[1:]:
        README.write_text(now)
        return 0
    for file in wrong:
        print(f"README.md is not what scripts/peers/results/{file} says: run scripts/peers/tables.py")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
