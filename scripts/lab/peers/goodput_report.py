"""Tables and plots of goodput.py's samples, for docs/benchmarks/goodput.md.

usage: goodput_report.py goodput.json [OUT_FOLDER]      writes goodput.md and attainment.svg
"""

import json
import platform
import sys
from html import escape
from pathlib import Path

COLOURS = {
    "cleave auto": "#0b6e4f",
    "cleave split": "#3aa17e",
    "cleave whole": "#9acd32",
    "llama.cpp": "#c0392b",
    "vLLM": "#2c5aa0",
}
WIDTH, HEIGHT, COLUMNS = 300, 190, 3
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 30, 30


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def families(result: dict) -> dict[str, str]:
    """Returns the system of each family that went on, by family, in the table's order."""
    kept = {}
    for system in result["systems"]:
        if system["name"] not in result["left_out"]:
            kept.setdefault(system["family"], system["name"])
    return kept


def points(result: dict, system: str, workload: str) -> list[tuple[float, float]]:
    """Returns rates and attainments, ascending."""
    cells = [c for c in result["cells"] if (c["system"], c["workload"]) == (system, workload)]
    return sorted((cell["rate"], cell["attainment"]) for cell in cells)


def crossing(measured: list[tuple[float, float]], goal: float) -> dict:
    """Returns the rate at which attainment falls to the goal, with its bound if the search found only one."""
    failed = [point for point in measured if point[1] < goal]
    first = min(failed, default=None)
    kept = [point for point in measured if point[1] >= goal and (first is None or point[0] < first[0])]
    last = max(kept, default=None)
    if last is None:
        # Below the lowest rate that was tried the goodput is only known to be above 0.
        return {"rps": None, "from": 0.0, "to": first[0] if first else None, "how": "below the lowest rate"}
    if first is None:
        return {"rps": last[0], "from": last[0], "to": None, "how": "at least: the highest rate was kept"}
    (low, kept_share), (high, failed_share) = last, first
    rps = low + (high - low) * (kept_share - goal) / (kept_share - failed_share)
    return {"rps": rps, "from": low, "to": high, "how": "interpolated"}


def goodputs(result: dict, goal: float) -> dict:
    found = {}
    for workload in result["workloads"]:
        for family, system in families(result).items():
            measured = points(result, system, workload)
            if measured:
                one = crossing(measured, goal) | {"system": system}
                one["rps_per_core"] = one["rps"] and one["rps"] / result["cores"]
                found.setdefault(workload, {})[family] = one
    return found


def shown(one: dict | None) -> str:
    if one is None:
        return ""
    if one["rps"] is None:
        return f"< {one['to']:.2f}"
    return f"≥ {one['rps']:.2f}" if one["to"] is None else f"{one['rps']:.2f}"


def least(one: dict | None) -> float:
    return (one or {}).get("rps") or 0.0


def markdown(result: dict) -> str:
    order = list(families(result))
    options, found = result["options"], result["goodput"]
    text = [
        f"{result['model']}, bf16, {result['cores']} cores ({result['processor']}), {result['started']}; "
        f"{' to '.join(str(of(result['requests'])) for of in (min, max))} requests in each run, goal {options['goal']:.0%}, targets"
        f" {options['ttft_factor']:g} × and {options['tpot_factor']:g} × the best unloaded TTFT and TPOT.",
        "Goodput in requests per second on all cores (bold: the most):",
        "",
        "| prompt / answer, tokens | TTFT, TPOT at most | " + " | ".join(order) + " |",
        "|---|---|" + "---|" * len(order),
    ]
    for name, workload in result["workloads"].items():
        row = found.get(name, {})
        best = max((least(one) for one in row.values()), default=0.0)
        cells = []
        for family in order:
            cell = shown(row.get(family))
            cells.append(f"**{cell}**" if cell and best and least(row[family]) == best else cell)
        lengths = f"{name}: {workload['input']} / {workload['output']}"
        targets = f"{workload['ttft_ms']:.0f} ms, {workload['tpot_ms']:.1f} ms"
        text.append(f"| {lengths} | {targets} | " + " | ".join(cells) + " |")
    text += ["", "The same per core, and how sure: between which rates the goal was lost, with the attainment there.", ""]
    text += ["| | " + " | ".join(order) + " |", "|---|" + "---|" * len(order)]
    for name in result["workloads"]:
        text.append(f"| {name} | " + " | ".join(detail(result, name, family) for family in order) + " |")
    text += ["", "Unloaded, one request at a time: median TTFT and TPOT in ms.", ""]
    text += ["| | " + " | ".join(order) + " |", "|---|" + "---|" * len(order)]
    for name, workload in result["workloads"].items():
        alone = [workload["unloaded"].get(system) for system in families(result).values()]
        cells = [f"{one['ttft_ms']:.0f}, {one['tpot_ms']:.1f}" if one else "" for one in alone]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    text += ["", *losses(result), "", *notes(result), ""]
    return "\n".join(text)


def detail(result: dict, workload: str, family: str) -> str:
    one = result["goodput"].get(workload, {}).get(family)
    if one is None:
        return ""
    shares = dict(points(result, one["system"], workload))
    ends = [f"{rate:.2f}/s: {shares[rate]:.0%}" for rate in (one["from"], one["to"]) if rate in shares]
    per_core = f"{one['rps_per_core']:.2f} " if one["rps"] is not None else ""
    return f"{per_core}({', '.join(ends)})"


def losses(result: dict) -> list[str]:
    """Lists workloads on which Cleave is not the best, or choosing per request is not the best of Cleave."""
    lines = []
    for name, row in result["goodput"].items():
        rates = {family: least(one) for family, one in row.items()}
        ours = {family: rate for family, rate in rates.items() if family.startswith("cleave")}
        theirs = {family: rate for family, rate in rates.items() if family not in ours}
        if ours and theirs and max(theirs.values()) > max(ours.values()):
            peer = max(theirs, key=theirs.get)
            lines.append(f"- {name}: {peer} keeps {theirs[peer]:.2f}/s, Cleave {max(ours.values()):.2f}/s.")
        others = {family: rate for family, rate in ours.items() if family != "cleave auto"}
        if "cleave auto" in ours and others and max(others.values()) > ours["cleave auto"]:
            best = max(others, key=others.get)
            lines.append(f"- {name}: {best} keeps {others[best]:.2f}/s, cleave auto {ours['cleave auto']:.2f}/s.")
    return ["Where Cleave loses:", ""] + (lines or ["- nowhere in this run."])


def notes(result: dict) -> list[str]:
    lines = [f"- {s['name']}: {s['notes']}." for s in result["systems"] if s["name"] in families(result).values()]
    lines += [f"- {name} was left out: {why}." for name, why in result["left_out"].items()]
    lines += [f"- {name}: {version}." for name, version in result.get("versions", {}).items()]
    late = max((cell["lateness_ms"]["p99"] for cell in result["cells"]), default=0.0)
    lines.append(
        f"- The load generator shares the cores; it was late by {late:.0f} ms at most (p99 of the worst run)."
        f" Load of the machine before the start: {result['load_before']:.2f}."
    )
    wrong = sum(cell["outputs_differ"] + cell["inputs_differ"] for cell in result["cells"])
    lines.append(f"- Answers or prompts of another length than asked for: {wrong}.")
    return lines


def plot(result: dict, workload: str) -> list[str]:
    """Attainment against rate, in the coordinates of one panel."""
    measured = {family: points(result, system, workload) for family, system in families(result).items()}
    top_rate = max((rate for each in measured.values() for rate, _ in each), default=1.0) * 1.05
    inner = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    x = lambda rate: LEFT + inner[0] * rate / top_rate
    y = lambda share: TOP + inner[1] * (1 - share)
    found = result["workloads"][workload]
    head = f"{workload}: {found['input']} in, {found['output']} out"
    out = [f'<text x="{LEFT}" y="{TOP - 10}" class="head">{escape(head)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        out.append(f'<path d="M{LEFT} {y(share):.1f}h{inner[0]}" class="grid"/>')
        out.append(f'<text x="{LEFT - 4}" y="{y(share) + 3:.1f}" class="end">{share:.0%}</text>')
    for i in range(5):
        rate = top_rate * i / 4
        out.append(f'<text x="{x(rate):.1f}" y="{HEIGHT - 16}" class="mid">{rate:.1f}</text>')
    out.append(f'<path d="M{LEFT} {y(result["options"]["goal"]):.1f}h{inner[0]}" class="goal"/>')
    for family, each in measured.items():
        colour = COLOURS.get(family, "#777")
        line = " ".join(f"{x(rate):.1f},{y(share):.1f}" for rate, share in each)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out += [f'<circle cx="{x(rate):.1f}" cy="{y(share):.1f}" r="2.6" fill="{colour}"/>' for rate, share in each]
    return out


def svg(result: dict) -> str:
    names = list(result["workloads"])
    rows = -(-len(names) // COLUMNS)
    width, height = WIDTH * min(COLUMNS, len(names)), HEIGHT * rows + 30
    style = "text{font:10px sans-serif;fill:#333}.head{font-weight:bold;font-size:11px}.end{text-anchor:end}"
    style += ".mid{text-anchor:middle}.grid{stroke:#ddd}.goal{stroke:#333;stroke-dasharray:4 3}"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    out += [f"<style>{style}</style>", f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for number, name in enumerate(names):
        place = f"translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})"
        out += [f'<g transform="{place}">', *plot(result, name), "</g>"]
    at = LEFT
    for family in families(result):
        colour = COLOURS.get(family, "#777")
        out.append(f'<rect x="{at}" y="{height - 22}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{at + 14}" y="{height - 13}">{escape(family)}</text>')
        at += 30 + 6 * len(family)
    out.append(f'<text x="{at}" y="{height - 13}">share of requests within their targets, by requests per second</text>')
    return "\n".join([*out, "</svg>", ""])


def write(result: dict, folder: Path) -> None:
    text = markdown(result)
    (folder / "goodput.md").write_text(text)
    (folder / "attainment.svg").write_text(svg(result))
    print(text)


def main() -> None:
    path = Path(sys.argv[1])
    result = json.loads(path.read_text())
    result["goodput"] = goodputs(result, result["options"]["goal"])
    write(result, Path(sys.argv[2]) if len(sys.argv) > 2 else path.parent)


if __name__ == "__main__":
    main()
