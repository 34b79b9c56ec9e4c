"""Compares `cleave generate --device cuda` on reference checkpoints with transformers and with the processor.

usage: goldens.py --cleave BIN --root REPOSITORY [--scratch FOLDER] [--jobs N] [--prompts N,N,…] [--model NAME,NAME,…]
                  [--precision f32,bf16]

In f32, which uses no tensor cores, every token must be the golden's and the first logits within 1e-3. In bf16 the first
logits may differ from the processor's in f32 by at most twice as much as the processor's in bf16 do: for the same
checkpoints, and for two random ones whose heads and prompts (several tiles and spans) reach every tensor-core kernel.
Equal tokens are only counted there. Writes `golden` records; exits with 1 if an answer breaks these rules. Standard
library only.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record

LOGIT_TOLERANCE = 1e-3
# Random checkpoints whose heads and experts tensor cores take.
SHAPES = ["tiny-llama-64", "tiny-qwen3-128", "tiny-qwen3-moe", "tiny-gpt-oss"]
# Lengths of their prompts: less than a tile, some tiles of rows, and more than a span of keys.
LENGTHS = [5, 65, 700]
# The allowed difference of two ways of rounding if both are near the truth, as a share of the largest logit.
LEAST_SHARE = 4e-3


def logits_apart(ours: list, theirs: list) -> float:
    """Returns the largest difference by id; an id in one list alone is compared with the smallest of the other."""
    found = dict(map(tuple, ours))
    last = theirs[-1][1]
    return max(abs(found.get(token, last) - logit) for token, logit in theirs)


def same_before(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def generate(args: argparse.Namespace, folder: Path, how: tuple[str, str], prompt: list[int], tokens: int) -> dict:
    """Runs the program and returns its answer, or `error`; `how` is device and precision."""
    device, precision = how
    command = [args.cleave, "generate", "--device", device, "--json", "--dtype", precision, "--ignore-eos"]
    command += ["--model", str(folder), "--max-tokens", str(tokens), "--prompt-tokens", ",".join(map(str, prompt))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {args.limit:g} s"}
    if done.returncode != 0:
        return {"error": (done.stderr or done.stdout)[-1500:]}
    return json.loads(done.stdout)


def check_f32(args: argparse.Namespace, folder: Path) -> bool:
    """Whether the checkpoint gives the answers of transformers."""
    goldens = json.loads((folder / "goldens.json").read_text())["prompts"]
    chosen = [goldens[index] for index in args.prompts if index < len(goldens)]
    same, apart, kept, wrong = 0, 0.0, [], []
    for golden in chosen:
        answer = generate(args, folder, (args.device, "f32"), golden["prompt_tokens"], len(golden["tokens"]))
        if "error" in answer:
            wrong.append(answer["error"][-300:])
            continue
        kept.append(same_before(answer["tokens"], golden["tokens"]))
        difference = logits_apart(answer["first_top_logits"], golden["first_top_logits"])
        apart = max(apart, difference)
        if answer["tokens"] == golden["tokens"] and difference <= LOGIT_TOLERANCE:
            same += 1
        else:
            wrong.append(f"{kept[-1]} tokens as golden, logits {difference:.2g} apart")
    return put(folder, "f32", (len(chosen), same), (kept, apart), wrong)


def check_bf16(args: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> bool:
    """Whether the device rounds no worse than the processor."""
    same, apart, kept, wrong = 0, 0.0, [], []
    for prompt in prompts:
        ways = [("cpu", "f32"), ("cpu", "bf16"), (args.device, "bf16")]
        answers = [generate(args, folder, way, prompt, args.tokens) for way in ways]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            wrong.append(errors[0][-300:])
            continue
        exact, plain, ours = answers
        kept.append(same_before(ours["tokens"], plain["tokens"]))
        truth = exact["first_top_logits"]
        most = max(abs(logit) for _, logit in truth)
        of_plain, of_ours = (logits_apart(of["first_top_logits"], truth) for of in (plain, ours))
        apart = max(apart, of_ours)
        limit = 2 * of_plain + LEAST_SHARE * most
        if of_ours <= limit:
            same += 1
        else:
            wrong.append(f"a prompt of {len(prompt)}: logits {of_ours:.3g} from f32, {limit:.3g} are allowed")
    return put(folder, "bf16", (len(prompts), same), (kept, apart), wrong)


def put(folder: Path, precision: str, count: tuple[int, int], found: tuple[list[int], float], wrong: list[str]) -> bool:
    """Writes the record, and returns whether all prompts are right."""
    prompts, same = count
    kept, apart = found
    fields = {"prompts": prompts, "same": same, "tokens_same_before_first_other": kept, "logits_apart": apart}
    record.put("golden", model=folder.name, precision=precision, **fields, wrong="; ".join(wrong))
    print(f"{folder.name:16} {precision}: {same} of {prompts} right, logits {apart:.2g} apart", file=sys.stderr)
    for one in wrong:
        print(f"    {one}", file=sys.stderr)
    return not wrong


def synthesised(args: argparse.Namespace) -> list[Path]:
    """Returns random checkpoints whose shapes tensor cores take; they are written once."""
    folders = []
    for shape in SHAPES if args.scratch else []:
        folder = args.scratch / shape
        if not (folder / "config.json").exists():
            subprocess.run([args.cleave, "synth", "--shape", shape, "--out", str(folder)], check=True, capture_output=True)
        folders.append(folder)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written; none are if absent")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=20, help="seconds for one prompt")
    parser.add_argument("--tokens", type=int, default=16, help="drawn in bf16")
    parser.add_argument("--lengths", type=lambda text: [int(length) for length in text.split(",")], default=LENGTHS)
    parser.add_argument("--prompts", type=lambda text: [int(index) for index in text.split(",")], default=[0, 9, 19])
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["bf16", "f32"])
    parser.add_argument("--model", type=lambda text: text.split(","), help="names of folders; all if absent")
    args = parser.parse_args()
    folders = sorted(path.parent for path in (args.root / "testdata").glob("*/goldens.json"))
    folders = [folder for folder in folders if not args.model or folder.name in args.model]
    checks = []
    if "bf16" in args.precision:
        long = [[(3 + at * 37 + length) % 500 for at in range(length)] for length in args.lengths]
        checks += [(check_bf16, args, folder, long) for folder in synthesised(args)]
        for folder in folders:
            goldens = json.loads((folder / "goldens.json").read_text())["prompts"]
            prompts = [goldens[index]["prompt_tokens"] for index in args.prompts if index < len(goldens)]
            checks.append((check_bf16, args, folder, prompts))
    if "f32" in args.precision:
        checks += [(check_f32, args, folder) for folder in folders]
    with ThreadPoolExecutor(args.jobs) as pool:
        right = list(pool.map(lambda check: check[0](*check[1:]), checks))
    if not checks or not all(right):
        sys.exit(1)


if __name__ == "__main__":
    main()
