"""Reference checkpoints from end to end: `cleave generate --device cuda` against what transformers made of them.

usage: goldens.py --cleave BIN --root REPOSITORY [--jobs N] [--prompts N,N,…] [--model NAME,NAME,…]

In f32 every token must be the golden's and the first logits within 1e-3. In bf16, whose tokens nobody promises, the
record says how many of them are the golden's before the first that is not. Writes `golden` records; exits with 1 if
an f32 answer differs. Standard library only.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record

LOGIT_TOLERANCE = 1e-3


def logits_apart(ours: list, theirs: list) -> float:
    """The largest difference by id; an id that only one list has is held against the other's smallest."""
    found = dict(map(tuple, ours))
    last = theirs[-1][1]
    return max(abs(found.get(token, last) - logit) for token, logit in theirs)


def same_before(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def generate(args: argparse.Namespace, folder: Path, precision: str, golden: dict) -> dict:
    prompt = ",".join(map(str, golden["prompt_tokens"]))
    command = [args.cleave, "generate", "--device", args.device, "--json", "--dtype", precision, "--ignore-eos"]
    command += ["--model", str(folder), "--max-tokens", str(len(golden["tokens"])), "--prompt-tokens", prompt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    if done.returncode != 0:
        return {"error": (done.stderr or done.stdout)[-1500:]}
    return json.loads(done.stdout)


def check(args: argparse.Namespace, folder: Path, precision: str) -> bool:
    """Whether the checkpoint gives what it must."""
    goldens = json.loads((folder / "goldens.json").read_text())["prompts"]
    chosen = [goldens[index] for index in args.prompts if index < len(goldens)]
    same, apart, kept, error = 0, 0.0, [], None
    for golden in chosen:
        try:
            answer = generate(args, folder, precision, golden)
        except subprocess.TimeoutExpired:
            answer = {"error": f"longer than {args.limit} s"}
        if "error" in answer:
            error = answer["error"]
            print(f"{folder.name} {precision}: {error}", file=sys.stderr)
            continue
        kept.append(same_before(answer["tokens"], golden["tokens"]))
        difference = logits_apart(answer["first_top_logits"], golden["first_top_logits"])
        apart = max(apart, difference)
        same += answer["tokens"] == golden["tokens"] and (precision != "f32" or difference <= LOGIT_TOLERANCE)
    record.put(
        "golden",
        model=folder.name,
        precision=precision,
        prompts=len(chosen),
        same=same,
        tokens_same_before_first_other=kept,
        logits_apart=apart,
        **({"error": error[-300:]} if error else {}),
    )
    is_right = error is None and (precision != "f32" or same == len(chosen))
    print(f"{folder.name:12} {precision}: {same} of {len(chosen)} as transformers, logits {apart:.2g} apart", file=sys.stderr)
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one prompt")
    parser.add_argument("--prompts", type=lambda text: [int(index) for index in text.split(",")], default=[0, 9, 19])
    parser.add_argument("--model", type=lambda text: text.split(","), help="names of folders; all if absent")
    args = parser.parse_args()
    folders = sorted(path.parent for path in (args.root / "testdata").glob("*/goldens.json"))
    folders = [folder for folder in folders if not args.model or folder.name in args.model]
    pairs = [(folder, precision) for precision in ("f32", "bf16") for folder in folders]
    with ThreadPoolExecutor(args.jobs) as pool:
        right = list(pool.map(lambda pair: check(args, *pair), pairs))
    if not folders or not all(right):
        sys.exit(1)


if __name__ == "__main__":
    main()
