#!/usr/bin/env python3
"""Trains a demo checkpoint for assets/demo/: a Llama of 17.8 million parameters that fits in 12 MB by four bits.

The demo lets `cleave serve` answer on a laptop without a download. It knows a narrow field, Rust and Cleave, and
answers a question with a paragraph and the end token. Its statements are not reliable.

Each step reads files that the one before left in --work (outside the repository, some hundred MB):

    P=scripts/models/train_demo.py
    python $P prepare --work DIR --clones CLONES    # documentation -> tokenizer.json, *.npy; demo_pages.py names it
    python $P train   --work DIR ...                # checkpoint.pt, with the optimisers' state, every few minutes
    python $P export  --work DIR [--out assets/demo]    # checkpoint -> a Hugging Face folder of four bits
    python $P check   --work DIR                    # transformers and compressed-tensors read the same weights
    python $P ask     --work DIR --cleave BIN       # held-out losses and Cleave's answers -> docs/models.md

CLONES has clones of the books whose addresses are in demo_pages.py, as `git clone` names them; without it these are
left out.

On a GPU, from nothing (an epoch has some 3 million tokens; not run yet):

    python $P train --work DIR --device cuda --batch 32768 --micro 32768 --rate 4e-3 --minutes 10 --epochs-max 24

assets/demo was trained in 93 minutes of one core, and grew from a smaller checkpoint, whose tokenizer it keeps:

    export OMP_WAIT_POLICY=PASSIVE    # threads that wait do not spin; with other work beside, twice as fast
    python $P prepare --work DIR --clones CLONES --tokenizer testdata/trained/tokenizer.json
    python $P train --work DIR --grow-from testdata/trained --threads 1 --rate 2.5e-3 --batch 6144 --micro 6144 \
        --minutes 93

A smaller shape learns faster at first. To begin with one of one's own, train `--shape small` and export it.

An export is possible at any time while training runs, and SIGTERM saves and ends it. `train` with the same --work goes
on where a stopped run was: the schedule counts the minutes of all runs, so --minutes may be raised or lowered on the
way. `--restart` begins the schedule anew from the weights in --work.

Towards the end (--round-from) the products use weights rounded to four bits, and the exact ones learn from their
gradients, so that the exported numbers lose next to nothing.

Data and licences: the model card in assets/demo/README.md. The checkpoint carries the repository's licence, Apache-2.0.
"""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from demo_corpus import PARTS, SEED, prepare
from demo_model import SHAPES, Llama, grow, rounded

ROOT = Path(__file__).resolve().parents[2]
HELD_TOKENS = 65536


def windows(tokens: np.ndarray, end: int, length: int, rng: np.random.Generator):
    """Yields windows without end: each epoch has the documents in a new order, cut at the window's length."""
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    while True:
        flat = np.concatenate([documents[i] for i in rng.permutation(len(documents))]).astype(np.int64)
        for start in range(0, len(flat) - length - 1, length):
            yield flat[start : start + length + 1]


class Mixture:
    """Windows of the corpus's parts, by shares that may change, of a length that may change."""

    def __init__(self, work: Path, end: int, seed: list[int]):
        self.parts = [np.load(work / f"{name}.npy") for name in PARTS]
        self.tokens = sum(map(len, self.parts))
        self.end, self.rng = end, np.random.default_rng(seed)
        self.length, self.sources = 0, []

    def batch(self, count: int, length: int, shares: list[float]) -> torch.Tensor:
        if length != self.length:
            self.length = length
            self.sources = [windows(part, self.end, length, self.rng) for part in self.parts]
        chosen = self.rng.choice(len(self.sources), size=count, p=np.array(shares) / sum(shares))
        return torch.from_numpy(np.stack([next(self.sources[part]) for part in chosen]))


def schedule(progress: float) -> float:
    """Returns the share of the full rate: a short warm-up, then a cosine down to a twentieth."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * (progress - 0.02) / 0.98))


@torch.no_grad()
def held_loss(model, tokens: np.ndarray, args, length: int = 256) -> float:
    """Returns nats per token of held-out text, in windows of their own."""
    length = min(length, len(tokens) - 1)
    count = min((len(tokens) - 1) // length, HELD_TOKENS // length)
    ids = torch.from_numpy(tokens[: count * length + 1].astype(np.int64)).to(args.device)
    inputs, targets = ids[:-1].view(count, length), ids[1:].view(count, length)
    total = 0.0
    for at in range(0, count, 8):
        part = slice(at, at + 8)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            total += float(model(inputs[part], targets[part])) * len(inputs[part])
    return total / count


class Training:
    """A model, its optimisers and how far they are; the file checkpoint.pt holds all of it."""

    def __init__(self, args):
        self.args, self.path = args, args.work / "checkpoint.pt"
        self.model = Llama(SHAPES[args.shape]).to(args.device)
        # Of the tokens seen, those before the schedule began.
        self.seen, self.seen_before, self.step, self.minutes = 0, 0, 0, 0.0
        state = torch.load(self.path, map_location=args.device, weights_only=True) if self.path.exists() else None
        if state:
            self.model.load_state_dict(state["weights"])
            self.seen, self.step = state["seen"], state["step"]
            self.seen_before = self.seen if args.restart else state.get("seen_before", 0)
        elif args.grow_from:
            grow(self.model, args.grow_from)
        matrices = [parameter for _, parameter in self.model.projections()]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        # The orthogonalised update learns about as much from one token as AdamW from two, and tokens are scarce here.
        self.optimizers = [
            torch.optim.Muon(matrices, lr=args.rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if state and not args.restart:
            self.minutes = state["minutes"]
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)

    def learn(self, batches: list[torch.Tensor], rounding: bool, rate: float) -> float:
        loss_sum = 0.0
        with rounded(self.model) if rounding else contextlib.nullcontext():
            for batch in batches:
                batch = batch.to(self.args.device)
                with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bf16):
                    loss = self.model(batch[:, :-1], batch[:, 1:]) / len(batches)
                loss.backward()
                loss_sum += loss.detach()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += sum(batch[:, 1:].numel() for batch in batches)
        return float(loss_sum)

    def save(self, held: dict[str, np.ndarray], tokens: int) -> None:
        exact = {name: held_loss(self.model, part, self.args) for name, part in held.items()}
        with rounded(self.model):
            four = {name: held_loss(self.model, part, self.args) for name, part in held.items()}
        shown = ", ".join(f"{name} {exact[name]:.3f} ({four[name]:.3f} in four bits)" for name in held)
        print(f"step {self.step}: held-out {shown}", flush=True)
        state = {
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "shape": self.args.shape,
            "seen": self.seen,
            "seen_before": self.seen_before,
            "step": self.step,
            "minutes": self.minutes,
            "epochs": self.seen / tokens,
            "loss": exact,
            "loss_rounded": four,
        }
        # The file is written aside and renamed, so that an export at the same time finds a whole one.
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)


def train(args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    from tokenizers import Tokenizer

    from demo_corpus import END_OF_TEXT

    (args.work / "train.pid").write_text(f"{os.getpid()}\n")
    training = Training(args)
    end = Tokenizer.from_file(str(args.work / "tokenizer.json")).token_to_id(END_OF_TEXT)
    # A run that goes on reads the documents in another order.
    mixture = Mixture(args.work, end, [SEED, training.seen])
    held = {path.stem[5:]: np.load(path) for path in sorted(args.work.glob("held-*.npy"))}
    size = sum(p.numel() for p in training.model.parameters())
    print(f"{size} parameters, {mixture.tokens} tokens an epoch, {training.minutes:.0f} minutes so far", flush=True)
    started = saved = time.monotonic()
    minutes_before, seen_before, steps_before, running = training.minutes, training.seen, training.step, None
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    while not stopped:
        training.minutes = minutes_before + (time.monotonic() - started) / 60.0
        epochs = (training.seen - training.seen_before) / mixture.tokens
        progress = max(training.minutes / args.minutes, epochs / args.epochs_max)
        if progress >= 1.0 or (args.steps and training.step - steps_before >= args.steps):
            break
        # The last part of a run has long windows, which teach the positions that short ones never reach.
        length = args.window_long if progress > args.long_from else args.window
        shares = args.shares_last if progress > args.last_from else args.shares
        micro = max(args.micro // length, 1)
        parts = max(args.batch // (micro * length), 1)
        batches = [mixture.batch(micro, length, shares) for _ in range(parts)]
        rounding = progress > args.round_from
        loss = training.learn(batches, rounding, args.rate * schedule(progress))
        running = loss if running is None else 0.95 * running + 0.05 * loss
        if training.step - steps_before <= 3 or training.step % 20 == 0:
            speed = (training.seen - seen_before) / (time.monotonic() - started)
            shown = f"{training.minutes:.1f} min {epochs:.2f} epochs loss {running:.3f} {speed:.0f} tok/s"
            print(f"step {training.step} {shown}", flush=True)
        if time.monotonic() - saved > 60.0 * args.save_minutes:
            training.save(held, mixture.tokens)
            saved = time.monotonic()
    training.save(held, mixture.tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the demo checkpoint in assets/demo/.")
    parser.add_argument("step", choices=["prepare", "train", "export", "check", "ask"])
    parser.add_argument("--work", type=Path, required=True, help="folder outside the repository for what is in between")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "demo")
    parser.add_argument("--html", type=Path, help="prepare: Rust's documentation; default: that of the rustc in PATH")
    parser.add_argument("--clones", type=Path, help="prepare: folder with clones of the other sources")
    parser.add_argument("--tokenizer", type=Path, help="prepare: keep this tokenizer.json, as --grow-from needs")
    parser.add_argument("--shape", choices=list(SHAPES), default="demo")
    parser.add_argument("--grow-from", type=Path, help="train: a smaller checkpoint of floats to begin with")
    parser.add_argument("--restart", action="store_true", help="train: begin the schedule anew from these weights")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock time of all runs together")
    parser.add_argument("--epochs-max", type=float, default=24.0, help="ends the schedule earlier on a fast device")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps, to measure speed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=6144, help="tokens a step")
    parser.add_argument("--micro", type=int, default=2048, help="tokens a forward pass")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--window-long", type=int, default=1024)
    parser.add_argument("--long-from", type=float, default=0.88, help="share of the time after which windows are long")
    shares = {"type": float, "nargs": len(PARTS), "metavar": tuple(name.upper() for name in PARTS)}
    parser.add_argument("--shares", **shares, default=[0.5, 0.2, 0.3], help="of the corpus's parts among the windows")
    parser.add_argument("--shares-last", **shares, default=[0.3, 0.15, 0.55], help="the same towards the end")
    parser.add_argument("--last-from", type=float, default=0.5, help="share of the time after which --shares-last hold")
    parser.add_argument("--round-from", type=float, default=0.7, help="share of the time after which weights are rounded")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--machine", default="two CPU cores", help="export: what trained it, for the model card")
    parser.add_argument("--cleave", type=Path, help="ask: the binary")
    args = parser.parse_args()
    if args.step == "prepare":
        sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
        html = args.html or Path(sysroot) / "share/doc/rust/html"
        prepare(args.work, html, args.clones, args.tokenizer)
    elif args.step == "train":
        train(args)
    else:
        import demo_export

        getattr(demo_export, args.step)(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
