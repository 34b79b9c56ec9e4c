"""Makes the JSON and the table of a run, and the page of GPU figures.

usage: report.py --records FILE --out FOLDER     writes FOLDER/<date>-<chip>.json and .md, prints the table
       report.py --page [--check]                docs/benchmarks/gpu.md, from the newest file in results/gpu
       report.py --collect FILE                  puts a run's JSON into results/gpu, and its table beside it

With --check nothing is written: exits with 1 if the page differs. Standard library only.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import record
from figures import OURS, figures

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results/gpu"
PAGE = ROOT / "docs/benchmarks/gpu.md"
BEGIN, END = "<!-- gpu: begin, by scripts/gpu/report.py --page -->", "<!-- gpu: end -->"
NOTHING = """No figure on a GPU exists yet: nothing of Cleave has run on one. Kernels and backend are compiled for GPUs and tested
on the processor, by an emulator; `scripts/gpu/run.sh` is what measures, on a machine that has one, and
[design/gpu-backend.md](../design/gpu-backend.md) has the figures that the code lets one expect."""


def name_of(run: dict) -> str:
    chip = re.sub(r"[^a-z0-9]+", "-", (run["chip"] or "no-gpu").lower().replace("nvidia", "")).strip("-")
    return f"{(run['date'] or 'undated')[:10]}-{chip}"


def cells(values: list[object]) -> str:
    return "| " + " | ".join("" if value is None else str(value) for value in values) + " |"


def table(header: list[str], rows: list[list[object]]) -> list[str]:
    return [cells(header), "|" + "---|" * len(header), *map(cells, rows), ""] if rows else []


def amount(value: float | None, unit: str = "") -> str:
    """Returns a number with three digits and a prefix."""
    if value is None:
        return ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def heading(run: dict) -> list[str]:
    machine = run["machine"]
    changed = ", with changes that are not committed" if run["is_modified"] else ""
    when, commit = (run["date"] or "")[:10], (run["commit"] or "")[:12]
    first = f"{run['chip']}, driver {run['driver']}, {when}, commit {commit}{changed}."
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    return [first, "", f"Host: {machine.get('processor')}, {machine.get('cores')} cores. {versions}".strip(), ""]


def best(rows: list[dict]) -> dict | None:
    """Returns our own figure of a shape: the one measured alone, if there is one."""
    alone = [row for row in rows if not row["beside"]]
    return min(alone or rows, key=lambda row: row["seconds"], default=None)


HEADINGS = {
    "decode": ["batch × context", "tokens/s", "ms a step", "of copy bandwidth"],
    "prefill": ["tokens", "tokens/s", "ms", "of matrix rate", "with attention"],
}


def speeds(run: dict, kind: str, sizes: list[str]) -> list[str]:
    """Returns the table of decode or prefill: a row for each shape, with each peer's speed beside ours of the same
    turns."""
    rows = run[kind]
    shapes = {shape_of(row, sizes) for row in rows}
    shapes = sorted(shapes, key=lambda shape: (shape[0], *reversed(shape[1:])))
    peers = sorted({row["system"] for row in rows} - {OURS})
    lines = []
    for shape in shapes:
        of = [row for row in rows if shape_of(row, sizes) == shape]
        ours = best([row for row in of if row["system"] == OURS])
        line = [shape[0], " × ".join(size(number) for number in shape[1:])]
        told = ours or {"tokens_per_second": None, "seconds": None}
        milliseconds = None if told["seconds"] is None else f"{told['seconds'] * 1e3:.3f}"
        line += [amount(told["tokens_per_second"]), milliseconds, ratio(told.get("ratio"))]
        if kind == "prefill":
            line.append(ratio(told.get("ratio_with_attention")))
        lines.append(line + [beside(of, peer) for peer in peers])
    return table(["model", *HEADINGS[kind], *(f"{peer}, tokens/s (ours over it)" for peer in peers)], lines)


def shape_of(row: dict, sizes: list[str]) -> tuple:
    return (row["model"], *(row[name] for name in sizes))


def beside(rows: list[dict], peer: str) -> str:
    """Returns a peer's speed, and ours over it, if both took turns."""
    theirs = next((row for row in rows if row["system"] == peer), None)
    ours = next((row for row in rows if row["system"] == OURS and peer in row["beside"]), None)
    if theirs is None:
        return ""
    told = amount(theirs["tokens_per_second"])
    return f"{told} ({theirs['seconds'] / ours['seconds']:.2f})" if ours else told


def ceiling_lines(run: dict) -> list[str]:
    units = {"bytes/s": "B/s", "operations/s": "FLOP/s"}
    rows = [[name, amount(one["value"], units[one["unit"]]), one["how"]] for name, one in run["ceilings"].items()]
    return table(["ceiling", "measured", "how"], rows)


def lab_lines(run: dict) -> list[str]:
    rows = []
    for lab in run["labs"]:
        unit = "B/s" if "bytes" in lab else "FLOP/s"
        wrong = "" if lab["is_right"] else f"WRONG: {lab['error']:.2g} apart"
        rate, share = amount(lab.get("rate"), unit), ratio(lab.get("ratio"))
        rows.append([lab["lab"], lab["variant"], lab["shape"], f"{lab['seconds'] * 1e6:.1f}", rate, share, wrong])
    return table(["lab", "variant", "shape", "µs", "rate", "of ceiling", ""], rows)


HANDOFF = {
    "hand-off, ms": "seconds_each",
    "of that exposed": "exposed_seconds_each",
    "first token": "first_token_seconds",
    "per token": "token_seconds",
    "per token, several clients": "token_seconds_together",
}


def handoff_lines(run: dict) -> list[str]:
    rows = []
    for one in run["handoffs"]:
        milliseconds = [f"{one[name] * 1e3:.2f}" for name in HANDOFF.values()]
        rows.append([one["model"], one["arrangement"], one["prompt_tokens"], amount(one["bytes_each"], "B"), *milliseconds])
    return table(["model", "legs", "prompt", "KV", *HANDOFF], rows)


def load_lines(run: dict) -> list[str]:
    rows = []
    for row in run["loads"]:
        amounts = [amount(row["bytes"], "B"), f"{row['seconds']:.2f}", amount(row["rate"], "B/s")]
        rows.append([row["model"], row["from"], *amounts, row.get("ceiling"), ratio(row.get("ratio"))])
    return table(["weights", "from", "bytes", "s", "rate", "ceiling", "ratio"], rows)


def aim_lines(run: dict) -> list[str]:
    rows = []
    for aim in run["aims"]:
        found = aim["found"]
        verdict = {True: "yes", False: f"not {len(aim['failing'])} of {len(found)}", None: "not measured"}[aim["met"]]
        low, high = (min(found.values()), max(found.values())) if found else (None, None)
        rows.append([aim["aim"], aim["needed"], f"{low:.3g} to {high:.3g}" if found else "", verdict])
    return table(["aim", "needed", "found", "met"], rows)


def expected_lines(run: dict) -> list[str]:
    rows = []
    for one in run.get("expected", []):
        found = "not measured" if one["measured"] is None else ratio(one["measured"])
        rows.append([one["name"], ratio(one["expected"]), found, ratio(one["over"])])
    return table(["figure", "expected from the code", "measured", "measured over expected"], rows)


def counter_lines(run: dict) -> list[str]:
    names = ["memory", "multiprocessors", "tensor", "warps"]
    rows = []
    for one in run.get("counters", []):
        microseconds = f"{one['seconds'] * 1e6:.1f}" if "seconds" in one else ""
        rows.append([one["kernel"], microseconds, *(ratio(one.get(name)) for name in names)])
    return table(["kernel", "µs", *(f"{name}, share of peak" for name in names)], rows)


def check_lines(run: dict) -> list[str]:
    rows = []
    for one in run["tests"] + run["sanitizer"]:
        by = one.get("tool") or f"tests on {one['device']}"
        rows.append([one["suite"], by, one["passed"], "; ".join(one["failed"]) or "none"])
    for precision in sorted({one["precision"] for one in run["goldens"]}):
        of = [one for one in run["goldens"] if one["precision"] == precision]
        differ = [f"{one['model']} {one['prompts'] - one['same']}" for one in of if one["same"] < one["prompts"]]
        # Rounded weights must give logits within a tolerance, and need not give the same tokens.
        failed = [f"{one['model']}: {one['wrong']}" for one in of if one.get("wrong")]
        wrong = "; ".join(differ if precision == "f32" else failed) or "none"
        rows.append([f"reference prompts, {precision}", "cleave generate", sum(one["same"] for one in of), wrong])
    found = [f"- {one['test']}: {one['text']}" for one in run.get("findings", [])]
    return table(["checked", "by", "right", "wrong"], rows) + ([*found, ""] if found else [])


def missing_lines(run: dict) -> list[str]:
    lines = [f"- {one['what']}: {one['why']}" for one in run["absent"]]
    lines += [f"- {one['system']}, {one['model']} {one['shape']}: {one['why']}" for one in run["skipped"]]
    for one in run["stages"]:
        if one["status"] != "ok":
            lines.append(f"- stage {one['name']}: {one['status']}" + (f": {one['why']}" if one.get("why") else ""))
    return ["Not there, or not measured:", "", *lines, ""] if lines else []


def whole(run: dict) -> str:
    """Returns the whole report as Markdown."""
    lines = [*heading(run), *expected_lines(run), *aim_lines(run), *ceiling_lines(run), *both_speeds(run)]
    lines += [*counter_lines(run), *lab_lines(run), *load_lines(run)]
    return "\n".join([*lines, *handoff_lines(run), *check_lines(run), *missing_lines(run)]).rstrip() + "\n"


def both_speeds(run: dict) -> list[str]:
    return speeds(run, "decode", ["batch", "context"]) + speeds(run, "prefill", ["tokens"])


def page_part(run: dict | None, path: Path | None) -> str:
    if run is None:
        return NOTHING
    tested = run["tests"] + run["sanitizer"]
    wrong = sum(len(one["failed"]) for one in tested)
    tests = f"{wrong} of the backend's tests fail there" if tested else "the backend's tests were not part of this run"
    met = [aim for aim in run["aims"] if aim["met"]]
    first, *_ = heading(run)
    page = path.with_suffix(".md")
    intro = f"{first} By `scripts/gpu/run.sh`: medians, and ceilings of the same run; all of it in [{page.name}](../../{page.relative_to(ROOT)})."
    checks = f"{len(met)} of {len(run['aims'])} aims are met; {tests}."
    return "\n".join([intro, checks, "", *both_speeds(run)]).rstrip()


def newest() -> Path | None:
    """Returns the newest run by its date; of one day, the run that began last."""
    runs = sorted(RESULTS.glob("*.json"), key=lambda path: json.loads(path.read_text())["date"] or "")
    return runs[-1] if runs else None


def write_page(check: bool) -> None:
    path = newest()
    part = page_part(json.loads(path.read_text()) if path else None, path)
    file = PAGE
    text = file.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE.name} lacks {BEGIN} or {END}")
    wanted = f"{before}{BEGIN}\n{part}\n{END}{after}"
    if check and wanted != text:
        sys.exit(f"{PAGE.name} is not what results/gpu says: run scripts/gpu/report.py --page")
    if not check:
        file.write_text(wanted)


def write(run: dict, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name_of(run)}.json"
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(whole(run))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--records", help="what run.sh wrote")
    what.add_argument("--collect", type=Path, help="a run's JSON")
    what.add_argument("--page", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.page:
        write_page(args.check)
    elif args.collect:
        print(write(json.loads(args.collect.read_text()), RESULTS))
    else:
        run = figures(record.read(args.records))
        if args.out:
            write(run, args.out)
        sys.stdout.write(whole(run))


if __name__ == "__main__":
    main()
