"""Makes figures from a run's records: each with its ceiling, its ratio, and whether it meets its aim.

Formulas are model.py's: MBU = bytes that a step must read / time / measured copy bandwidth, MFU = operations of the
matrix products / time / measured rate of matrix products. Standard library only.
"""

from dataclasses import fields

import expected
import model as sizes

# The aims: for each figure, the ratio that it must reach, or the value that it must not exceed.
DECODE_MBU, DECODE_BATCH_MAX = 0.85, 32
PREFILL_MFU, PREFILL_TOKENS_MIN = 0.70, 2048
LONG_PREFILL_MFU, LONG_PREFILL_TOKENS = 0.60, 32768
ATTENTION_MBU, ATTENTION_CONTEXT = 0.85, 8192
SAMPLING_SHARE = 0.03
GAP_SECONDS = 20e-6
LOAD_SHARE = 0.80
# Two systems whose ratio is within this bound count as equally fast.
SPREAD = 0.02

OURS = "cleave"


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [{name: value for name, value in record.items() if name != "kind"} for record in records if record["kind"] == kind]


def ceilings(records: list[dict]) -> dict[str, dict]:
    """Returns ceilings by name; `copy` is the faster of our kernel and the driver, so that the ratios are not too
    good."""
    found = {one.pop("name"): one for one in of_kind(records, "ceiling")}
    copies = [found[name] for name in ("copy_kernel", "copy_driver") if name in found]
    if copies:
        found["copy"] = max(copies, key=lambda one: one["value"])
    # Without PyTorch the ceiling is that of tensor cores on operands in place, more than a matrix product can reach.
    for name in ("wgmma", "mma"):
        if name in found:
            found.setdefault("matmul", found[name])
    return found


def value(found: dict[str, dict], name: str) -> float | None:
    return found[name]["value"] if name in found else None


def models(records: list[dict]) -> dict[str, sizes.Model]:
    known = [field.name for field in fields(sizes.Model)]
    return {one["name"]: sizes.Model(**{name: one[name] for name in known if name in one}) for one in of_kind(records, "model")}


def decode_rows(records: list[dict], found: dict[str, dict]) -> list[dict]:
    copy, known, rows = value(found, "copy"), models(records), []
    for row in of_kind(records, "decode"):
        row["tokens_per_second"] = row["batch"] / row["seconds"]
        if copy and (model := known.get(row["model"])):
            # The timed steps also read half of their own tokens, a thousandth, which is left out.
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


def at_least(aim: str, limit: float, found: dict[str, float]) -> dict:
    return verdict(aim, f"≥ {limit:g}", found, [name for name, ratio in found.items() if ratio < limit])


def below(aim: str, limit: float, found: dict[str, float]) -> dict:
    return verdict(aim, f"< {limit:g}", found, [name for name, ratio in found.items() if ratio >= limit])


def verdict(aim: str, needed: str, found: dict[str, float], failing: list[str]) -> dict:
    """Returns the outcome of an aim: one figure that misses it fails it, and without figures it is not met."""
    return {"aim": aim, "needed": needed, "found": found, "failing": sorted(failing), "met": not failing if found else None}


def against_peers(rows: list[dict], shape: tuple[str, ...]) -> dict[str, float]:
    """Returns our speed over each peer's, for runs that took turns: 1 and more is as fast or faster."""
    ratios = {}
    for ours in (row for row in rows if row["system"] == OURS):
        for theirs in rows:
            took_turns = theirs["system"] in ours["beside"] and OURS in theirs["beside"]
            if took_turns and same(ours, theirs, *shape):
                name = " ".join([theirs["system"] + ",", *(str(ours[name]) for name in shape)])
                ratios[name] = theirs["seconds"] / ours["seconds"]
    return ratios


def lab_peers(labs: list[dict]) -> dict[str, float]:
    """Returns the same for kernels: a variant of a peer's kernel begins with the peer's name and a colon."""
    ratios = {}
    for theirs in labs:
        peer, colon, variant = theirs["variant"].partition(":")
        for ours in labs if colon else []:
            if (ours["lab"], ours["variant"], ours["shape"]) == (theirs["lab"], variant, theirs["shape"]):
                ratios[f"{peer}, {ours['lab']} {variant}, {ours['shape']}"] = theirs["seconds"] / ours["seconds"]
    return ratios


def sampling_shares(labs: list[dict], decode: list[dict]) -> dict[str, float]:
    """Returns the time of drawing tokens over that of a decode step, by batch: labs name the shape `batch N, vocabulary
    N`."""
    shares = {}
    for lab in (lab for lab in labs if lab["lab"] == "sample"):
        for step in (row for row in decode if row["system"] == OURS):
            if lab["shape"].startswith(f"batch {step['batch']},"):
                name = f"{lab['variant']}, {step['model']} {step['batch']}x{step['context']}"
                shares[name] = lab["seconds"] / step["seconds"]
    return shares


def marginal_attention(decode: list[dict], known: dict[str, sizes.Model], copy: float | None) -> dict[str, float]:
    """Returns attention's share of bandwidth within a step, from two steps that differ only in their context:

    batch × (longer − shorter) × kv_token_bytes / (time of the longer − time of the shorter) / copy
    """
    ratios = {}
    ours = [row for row in decode if row["system"] == OURS and not row["beside"]]
    for longer in (row for row in ours if row["context"] == ATTENTION_CONTEXT):
        shorter = [row for row in ours if same(row, longer, "model", "batch") and row["context"] < longer["context"]]
        model = known.get(longer["model"])
        if not (shorter and model and copy):
            continue
        before = min(shorter, key=lambda row: row["context"])
        tokens = longer["batch"] * (longer["context"] - before["context"])
        more = longer["seconds"] - before["seconds"]
        if more > 0:
            name = f"in a step, {model.name} {longer['batch']}x{longer['context']}"
            ratios[name] = tokens * model.kv_token_bytes / more / copy
    return ratios


def same(a: dict, b: dict, *names: str) -> bool:
    return all(a[name] == b[name] for name in names)


def attention_labs(labs: list[dict]) -> dict[str, float]:
    ratios = {}
    for lab in labs:
        if lab["lab"] == "attend" and lab["variant"] == "decode" and f"context {ATTENTION_CONTEXT}," in lab["shape"]:
            if "ratio" in lab:
                ratios[f"lab, {lab['shape']}"] = lab["ratio"]
    return ratios


def of_prompts(rows: list[dict], ratio: str) -> dict[str, float]:
    return {f"{row['model']} {row['tokens']}": row[ratio] for row in rows}


def aims(told: dict, gaps: list[dict]) -> list[dict]:
    decode, labs = told["decode"], told["labs"]
    known = {one["name"]: sizes.Model(**one) for one in told["models"]}
    few = [row for row in decode if row["system"] == OURS and row["batch"] <= DECODE_BATCH_MAX and "ratio" in row]
    steps = {f"{row['model']} {row['batch']}x{row['context']}": row["ratio"] for row in few}
    prompts = [row for row in told["prefill"] if row["system"] == OURS and "ratio" in row]
    middle = [row for row in prompts if PREFILL_TOKENS_MIN <= row["tokens"] < LONG_PREFILL_TOKENS]
    long = [row for row in prompts if row["tokens"] >= LONG_PREFILL_TOKENS]
    attention = attention_labs(labs) | marginal_attention(decode, known, value(told["ceilings"], "copy"))
    shares = sampling_shares(labs, decode)
    loaded = [row for row in told["loads"] if row["system"] == OURS and "ratio" in row]
    loads = {f"{row['model']} from {row['from']}": row["ratio"] for row in loaded}
    peers = against_peers(decode, ("model", "batch", "context")) | against_peers(told["prefill"], ("model", "tokens"))
    peers |= lab_peers(labs)
    return [
        at_least("decode, batch 1 to 32: share of copy bandwidth", DECODE_MBU, steps),
        at_least("prefill from 2k tokens: share of the matrix-product rate", PREFILL_MFU, of_prompts(middle, "ratio")),
        at_least("prefill of 32k tokens, attention included", LONG_PREFILL_MFU, of_prompts(long, "ratio_with_attention")),
        at_least("decode attention at 8k: share of copy bandwidth", ATTENTION_MBU, attention),
        below("sampling: share of a decode step", SAMPLING_SHARE, shares),
        below("processor's gap between decode steps, in seconds", GAP_SECONDS, {gap["name"]: gap["seconds"] for gap in gaps}),
        at_least("weights loaded: share of the slower of link and disk", LOAD_SHARE, loads),
        at_least("speed over every peer's in the same run", 1 - SPREAD, peers),
    ]


def expectations(told: dict) -> list[dict]:
    """Returns the expected figures beside the measured ones; over 1 is better than expected."""
    rows = []
    for one in expected.FIGURES:
        found = one.of(told[one.kind])
        over = None if found is None else found / one.value
        rows.append({"name": one.name, "expected": one.value, "measured": found, "over": over})
    return rows


def figures(records: list[dict]) -> dict:
    """Returns the content of a run's JSON."""
    machine = next(iter(of_kind(records, "machine")), {})
    found = ceilings(records)
    told = {name: machine.get(name) for name in ("date", "chip", "driver", "commit", "is_modified")}
    told |= {"machine": machine, "ceilings": found, "models": of_kind(records, "model")}
    told |= {"decode": decode_rows(records, found), "prefill": prefill_rows(records, found)}
    told |= {"labs": lab_rows(records, found), "loads": load_rows(records, found)}
    for name, kind in {"handoffs": "handoff", "tests": "tests", "goldens": "golden", "sanitizer": "sanitizer"}.items():
        told[name] = of_kind(records, kind)
    told["findings"] = of_kind(records, "finding")
    told["counters"] = of_kind(records, "counter")
    told["expected"] = expectations(told)
    for name, kind in {"stages": "stage", "skipped": "skipped", "absent": "absent", "gaps": "gap"}.items():
        told[name] = of_kind(records, kind)
    told["aims"] = aims(told, told["gaps"])
    return told
