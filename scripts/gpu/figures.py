"""From a run's records to its figures: each with its ceiling, its ratio, and whether it is what was aimed at.

Formulas are model.py's: MBU = bytes that a step must read / time / measured copy bandwidth, MFU = operations of the
matrix products / time / measured rate of matrix products. Standard library only.
"""

from dataclasses import fields

import model as sizes

# What is aimed at: of each figure, the ratio that it must reach, or the value that it must not exceed.
DECODE_MBU, DECODE_BATCH_MAX = 0.85, 32
PREFILL_MFU, PREFILL_TOKENS_MIN = 0.70, 2048
LONG_PREFILL_MFU, LONG_PREFILL_TOKENS = 0.60, 32768
ATTENTION_MBU, ATTENTION_CONTEXT = 0.85, 8192
SAMPLING_SHARE = 0.03
GAP_SECONDS = 20e-6
LOAD_SHARE = 0.80
# Two systems within this are as fast as each other.
SPREAD = 0.02

OURS = "cleave"


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [{name: value for name, value in record.items() if name != "kind"} for record in records if record["kind"] == kind]


def ceilings(records: list[dict]) -> dict[str, dict]:
    """By name; `copy` is the faster of our kernel and the driver, so that neither flatters us."""
    found = {one.pop("name"): one for one in of_kind(records, "ceiling")}
    copies = [found[name] for name in ("copy_kernel", "copy_driver") if name in found]
    if copies:
        found["copy"] = max(copies, key=lambda one: one["value"])
    return found


def value(found: dict[str, dict], name: str) -> float | None:
    return found[name]["value"] if name in found else None


def models(records: list[dict]) -> dict[str, sizes.Model]:
    known = [field.name for field in fields(sizes.Model)]
    return {one["name"]: sizes.Model(**{name: one[name] for name in known}) for one in of_kind(records, "model")}


def decode_rows(records: list[dict], found: dict[str, dict]) -> list[dict]:
    copy, known, rows = value(found, "copy"), models(records), []
    for row in of_kind(records, "decode"):
        row["tokens_per_second"] = row["batch"] / row["seconds"]
        if copy and (model := known.get(row["model"])):
            # Half of the timed steps' own tokens are read too; a thousandth, and left out.
            row["bytes"] = model.step_bytes(row["batch"], row["context"])
            row |= {"ceiling": "copy", "ratio": sizes.bandwidth_use(model, row["batch"], row["context"], row["seconds"], copy)}
        rows.append(row)
    return rows


def prefill_rows(records: list[dict], found: dict[str, dict]) -> list[dict]:
    rate, known, rows = value(found, "matmul"), models(records), []
    for row in of_kind(records, "prefill"):
        row["tokens_per_second"] = row["tokens"] / row["seconds"]
        if rate and (model := known.get(row["model"])):
            row["operations"] = model.prompt_operations(row["tokens"])
            row |= {"ceiling": "matmul", "ratio": sizes.compute_use(model, row["tokens"], row["seconds"], rate)}
            row["ratio_with_attention"] = sizes.compute_use_with_attention(model, row["tokens"], row["seconds"], rate)
        rows.append(row)
    return rows


def lab_rows(records: list[dict], found: dict[str, dict]) -> list[dict]:
    rows = of_kind(records, "lab")
    for row in rows:
        row["is_right"] = row["error"] <= row["tolerance"]
        for amount, ceiling in (("bytes", "copy"), ("operations", "matmul")):
            if amount in row:
                row["rate"] = row[amount] / row["seconds"]
                if value(found, ceiling):
                    row |= {"ceiling": ceiling, "ratio": row["rate"] / value(found, ceiling)}
    return rows


def load_rows(records: list[dict], found: dict[str, dict]) -> list[dict]:
    rows = of_kind(records, "load")
    for row in rows:
        limits = [(value(found, "host_to_device"), "host_to_device")]
        if row["from"] == "disk":
            limits.append((value(found, "disk_read"), "disk_read"))
        limits = [limit for limit in limits if limit[0]]
        row["rate"] = row["bytes"] / row["seconds"]
        if limits:
            slowest, name = min(limits)
            row |= {"ceiling": name, "ratio": row["rate"] / slowest}
    return rows


def verdict(aim: str, needed: str, ratios: dict[str, float], holds) -> dict:
    """One aim: what is furthest from it decides. Not measured is not met."""
    if not ratios:
        return {"aim": aim, "needed": needed, "found": None, "met": None}
    failing = {name: found for name, found in ratios.items() if not holds(found)}
    return {"aim": aim, "needed": needed, "found": ratios, "failing": sorted(failing), "met": not failing}


def against_peers(rows: list[dict], key) -> dict[str, float]:
    """Our speed over each peer's, of the turns that they took together: 1 and more is as fast or faster."""
    ratios = {}
    for ours in rows:
        if ours["system"] != OURS or not ours["beside"]:
            continue
        for theirs in rows:
            same = theirs["system"] in ours["beside"] and OURS in theirs["beside"] and key(theirs) == key(ours)
            if same:
                name = f"{theirs['system']}, {theirs['model']} " + "x".join(map(str, key(ours)[1:]))
                ratios[name] = theirs["seconds"] / ours["seconds"]
    return ratios


def lab_peers(labs: list[dict]) -> dict[str, float]:
    """The same for kernels: a lab of a peer's kernels has a variant that begins with its name and a colon."""
    ratios = {}
    for theirs in labs:
        peer, colon, variant = theirs["variant"].partition(":")
        for ours in labs if colon else []:
            if (ours["lab"], ours["variant"], ours["shape"]) == (theirs["lab"], variant, theirs["shape"]):
                ratios[f"{peer}, {ours['lab']} {variant}, {ours['shape']}"] = theirs["seconds"] / ours["seconds"]
    return ratios


def sampling_shares(labs: list[dict], decode: list[dict]) -> dict[str, float]:
    """Drawing tokens for a batch, over a decode step of that batch: labs call their shape `batch N, vocabulary N`."""
    shares = {}
    for lab in (lab for lab in labs if lab["lab"] == "sample"):
        for step in (row for row in decode if row["system"] == OURS):
            if lab["shape"].startswith(f"batch {step['batch']},"):
                name = f"{lab['variant']}, {step['model']} {step['batch']}x{step['context']}"
                shares[name] = lab["seconds"] / step["seconds"]
    return shares


def aims(figures: dict, gaps: list[dict]) -> list[dict]:
    decode, prefill, labs = figures["decode"], figures["prefill"], figures["labs"]
    step = {
        f"{row['model']} {row['batch']}x{row['context']}": row["ratio"]
        for row in decode
        if row["system"] == OURS and row["batch"] <= DECODE_BATCH_MAX and "ratio" in row
    }
    prompts = [row for row in prefill if row["system"] == OURS and "ratio" in row]
    middle = [row for row in prompts if PREFILL_TOKENS_MIN <= row["tokens"] < LONG_PREFILL_TOKENS]
    long = [row for row in prompts if row["tokens"] >= LONG_PREFILL_TOKENS]
    attention = {
        f"{lab['variant']}, {lab['shape']}": lab["ratio"]
        for lab in labs
        if lab["lab"] == "attend" and lab["variant"].startswith("decode") and f"context {ATTENTION_CONTEXT}" in lab["shape"] and "ratio" in lab
    }
    name = lambda row: f"{row['model']} {row['tokens']}"  # noqa: E731
    peers = against_peers(decode, lambda row: (row["model"], row["batch"], row["context"]))
    peers |= against_peers(prefill, lambda row: (row["model"], row["tokens"]))
    peers |= lab_peers(labs)
    at_least = lambda limit: lambda found: found >= limit  # noqa: E731
    return [
        verdict("decode, batch 1 to 32: share of copy bandwidth", f"≥ {DECODE_MBU}", step, at_least(DECODE_MBU)),
        verdict("prefill from 2k tokens: share of the matrix-product rate", f"≥ {PREFILL_MFU}", {name(row): row["ratio"] for row in middle}, at_least(PREFILL_MFU)),
        verdict("prefill of 32k tokens, attention included", f"≥ {LONG_PREFILL_MFU}", {name(row): row["ratio_with_attention"] for row in long}, at_least(LONG_PREFILL_MFU)),
        verdict("decode attention at 8k: share of copy bandwidth", f"≥ {ATTENTION_MBU}", attention, at_least(ATTENTION_MBU)),
        verdict("sampling: share of a decode step", f"< {SAMPLING_SHARE}", sampling_shares(labs, decode), lambda found: found < SAMPLING_SHARE),
        verdict("processor's gap between decode steps", "< 20 µs", {gap["name"]: gap["seconds"] for gap in gaps}, lambda found: found < GAP_SECONDS),
        verdict("weights loaded: share of the slower of link and disk", f"≥ {LOAD_SHARE}", {f"{row['model']} from {row['from']}": row["ratio"] for row in figures["loads"] if row["system"] == OURS and "ratio" in row}, at_least(LOAD_SHARE)),
        verdict("as fast as every peer in the same run", f"≥ {1 - SPREAD}", peers, at_least(1 - SPREAD)),
    ]


def figures(records: list[dict]) -> dict:
    """Everything that a run's JSON holds."""
    machine = next(iter(of_kind(records, "machine")), {})
    found = ceilings(records)
    told = {name: machine.get(name) for name in ("date", "chip", "driver", "commit", "is_modified")}
    told |= {"machine": machine, "ceilings": found, "models": of_kind(records, "model")}
    told |= {"decode": decode_rows(records, found), "prefill": prefill_rows(records, found)}
    told |= {"labs": lab_rows(records, found), "loads": load_rows(records, found)}
    for name, kind in {"handoffs": "handoff", "tests": "tests", "goldens": "golden", "sanitizer": "sanitizer"}.items():
        told[name] = of_kind(records, kind)
    for name, kind in {"stages": "stage", "skipped": "skipped", "absent": "absent", "gaps": "gap"}.items():
        told[name] = of_kind(records, kind)
    told["aims"] = aims(told, told["gaps"])
    return told
