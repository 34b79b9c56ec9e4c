#!/usr/bin/env python3
"""Trains the demo checkpoint in assets/demo/ from the Rust documentation that rustup installs.

The demo lets `cleave serve` answer on a laptop without a download: a Llama of some five million parameters whose
continuations read as English about Rust, and which answers a chat question with a paragraph and the end token. Its
statements are not reliable.

Three steps, each of which reads files that the one before left in --work (outside the repository, a few hundred MB):

    python scripts/models/train_demo.py prepare --work DIR    # HTML -> corpus.jsonl, tokenizer.json, *.npy
    python scripts/models/train_demo.py train   --work DIR --minutes 60    # checkpoint.pt, rewritten every few minutes
    python scripts/models/train_demo.py export  --work DIR [--out assets/demo]    # checkpoint -> a Hugging Face folder
    python scripts/models/train_demo.py sample  [--out assets/demo]    # a few continuations, by transformers

An export is possible at any time while training runs. `train --resume` starts another, usually shorter and cooler,
schedule from the weights in --work.

Data: the books and API pages under `$(rustc --print sysroot)/share/doc/rust/html` whose licence is MIT OR Apache-2.0
(The Rust Programming Language, the Reference, Rust by Example, the Rustonomicon, the Edition Guide, the Cargo, rustc,
rustdoc, Clippy and Unstable books, the error index, std). Left out: the Embedded Book, whose prose is CC-BY-SA-4.0;
translations; redirects of old editions. Copyright lies with the Rust project's contributors.

The checkpoint carries the repository's licence (Apache-2.0), one of the two of its data.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from demo_corpus import END_OF_TEXT, SEED, TURN_END, TURN_START, VOCAB, prepare

ROOT = Path(__file__).resolve().parents[2]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODEL_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, demo]
---

# Cleave demo

A Llama of {parameters:.1f} million parameters that comes with Cleave, so that there is something to serve without a
download. It continues English prose about Rust and answers a question with a paragraph and an end token. It is too small
to be right: use it to see tokens flow, not to learn Rust.

| | |
|---|---|
| Shape | {num_hidden_layers} layers, hidden {hidden_size}, {num_attention_heads} heads over {num_key_value_heads} KV heads of {head_dim}, MLP {intermediate_size}, tied embeddings |
| Context | {max_position_embeddings} tokens |
| Vocabulary | {vocab_size}, byte-level BPE trained on the same text |
| Weights | bfloat16, {size:.1f} MB |
| Chat | `<\|im_start\|>role`, newline, content, `<\|im_end\|>`; template in `tokenizer_config.json` |

## Data

The documentation of Rust as rustup installs it: The Rust Programming Language, the Reference, Rust by Example, the
Rustonomicon, the Edition Guide, the Cargo, rustc, rustdoc, Clippy, Style and Unstable books, the error index, and the
prose of std's pages. Copyright the Rust project's contributors, licensed MIT OR Apache-2.0. The Embedded Book is left
out, its prose being CC-BY-SA-4.0. A third of the text is the same paragraphs once more, as answers to questions made
from their headings, with a few greetings written for this purpose.

## Training

`scripts/models/train_demo.py`, plain PyTorch on one CPU core: {seen:.1f} million tokens ({epochs:.1f} epochs) in about an hour,
Muon for the matrices and AdamW for the rest, cosine schedule, windows of 256 tokens and towards the end of 1024.
Cross-entropy on held-out pages: {loss:.2f} nats a token.

## Licence

Apache-2.0, one of the two licences of the data.
"""

# === Model: a Llama whose parameters are named as transformers names them ===


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin):  # x: (batch, time, hidden); cos, sin: (time, head_dim)
        batch, time_, _ = x.shape
        # One product serves all three projections: at this size a call costs as much as the work.
        qkv = F.linear(x, torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)))
        qkv = qkv.view(batch, time_, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        # Attention is written out: with heads this small it is a third faster on a CPU than
        # scaled_dot_product_attention.
        q, k, v = (t.reshape(batch * self.heads, time_, self.head_dim) for t in (q, k, v))
        causal = torch.full((1, time_, time_), -1e4, dtype=q.dtype).triu(1)
        scores = torch.baddbmm(causal, q, k.transpose(1, 2), alpha=self.head_dim**-0.5)
        y = torch.bmm(torch.softmax(scores, dim=-1), v).view(batch, self.heads, time_, self.head_dim)
        return self.o_proj(y.transpose(1, 2).reshape(batch, time_, -1))


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Mlp(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = Body(c)
        half = torch.arange(0, c["head_dim"], 2).float() / c["head_dim"]
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).float(), c["rope_theta"] ** -half)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Products that add to the residual start small, so that its size does not grow with depth.
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1.0 / math.sqrt(2 * c["num_hidden_layers"]) if deep else 1.0
                nn.init.normal_(parameter, std=scale * (0.02 if "embed" in name else parameter.shape[1] ** -0.5))

    def forward(self, ids, targets):  # both (batch, time)
        x = self.model.embed_tokens(ids)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = (table[: ids.shape[1]].to(dtype) for table in (self.cos, self.sin))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# === Training ===


def windows(tokens: np.ndarray, end: int, length: int, rng: np.random.Generator):
    """Yields windows without end: each epoch has the documents in a new order, cut at the window's length."""
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    while True:
        flat = np.concatenate([documents[i] for i in rng.permutation(len(documents))]).astype(np.int64)
        for start in range(0, len(flat) - length - 1, length):
            yield flat[start : start + length + 1]


def schedule(progress: float) -> float:
    """Returns the share of the full rate: a short warm-up, then a cosine down to a twentieth."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * (progress - 0.02) / 0.98))


@torch.no_grad()
def held_loss(model, tokens: np.ndarray, length: int) -> float:
    count = min((len(tokens) - 1) // length, 32768 // length)
    ids = torch.from_numpy(tokens[: count * length + 1].astype(np.int64))
    inputs, targets = ids[:-1].view(count, length), ids[1:].view(count, length)
    return float(torch.stack([model(x[None], y[None]) for x, y in zip(inputs, targets)]).mean())


def train(args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    tokens, held = np.load(args.work / "train.npy"), np.load(args.work / "held.npy")
    end = Tokenizer.from_file(str(args.work / "tokenizer.json")).token_to_id(END_OF_TEXT)
    model = Llama(CONFIG)
    seen = step = 0
    if args.resume:
        state = torch.load(args.work / "checkpoint.pt", weights_only=True)
        model.load_state_dict(state["weights"])
        seen = state["seen"]
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokens)} tokens an epoch", flush=True)
    # The orthogonalised update learns about as much from one token as AdamW from two, and tokens are scarce here.
    optimizers = [
        torch.optim.Muon(matrices, lr=args.rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    # A resumed run reads the documents in another order.
    rng = np.random.default_rng([SEED, seen])
    length, source = args.window, windows(tokens, end, args.window, rng)
    started = saved = time.monotonic()
    seen_before, running = seen, None
    while True:
        progress = (time.monotonic() - started) / (60.0 * args.minutes)
        if progress >= 1.0 or (args.steps and step >= args.steps):
            break
        if progress > args.long_from and length != args.window_long:
            # The last part of a run has long windows, which teach the positions that short ones never reach.
            length, source = args.window_long, windows(tokens, end, args.window_long, rng)
        loss_sum = 0.0
        micro = max(args.micro // length, 1)
        parts = max(args.batch // (micro * length), 1)
        for _ in range(parts):
            batch = torch.from_numpy(np.stack([next(source) for _ in range(micro)]))
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / parts).backward()
            loss_sum += loss.item() / parts
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.rate * schedule(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + parts * micro * length
        running = loss_sum if running is None else 0.95 * running + 0.05 * loss_sum
        elapsed = time.monotonic() - started
        if step <= 3 or step % 20 == 0:
            epochs, speed = seen / len(tokens), (seen - seen_before) / elapsed
            print(f"step {step} {elapsed:.0f}s {epochs:.2f} epochs loss {running:.3f} {speed:.0f} tok/s", flush=True)
        if time.monotonic() - saved > 60.0 * args.save_minutes:
            save(model, args, held, seen, step)
            saved = time.monotonic()
    save(model, args, held, seen, step)


def save(model, args, held: np.ndarray, seen: int, step: int) -> None:
    loss = held_loss(model, held, 256)
    print(f"step {step}: held-out loss {loss:.3f}", flush=True)
    state = {"weights": model.state_dict(), "loss": loss, "seen": seen}
    # The file is written aside and renamed, so that an export at the same time finds a whole one.
    torch.save(state, args.work / "checkpoint.tmp")
    os.replace(args.work / "checkpoint.tmp", args.work / "checkpoint.pt")


# === Export ===


def export(work: Path, out: Path) -> None:
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end, start, stop = (tokenizer.token_to_id(t) for t in (END_OF_TEXT, TURN_START, TURN_END))
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["weights"].items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": [stop, end], "pad_token_id": end, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    files = {
        "config.json": CONFIG | {"bos_token_id": None, "eos_token_id": [stop, end], "pad_token_id": end},
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    card = MODEL_CARD.format(
        parameters=sum(tensor.numel() for tensor in weights.values()) / 1e6,
        size=(out / "model.safetensors").stat().st_size / 1e6,
        seen=state["seen"] / 1e6,
        epochs=state["seen"] / len(np.load(work / "train.npy")),
        loss=state["loss"],
        **CONFIG,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    total = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {total / 1e6:.1f} MB, after {state['seen']} tokens, held-out loss {state['loss']:.3f}")


def sample(out: Path, prompts: list[str], temperature: float) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    torch.manual_seed(SEED)
    asked = ["What is ownership?", "Tell me about traits.", "Hello!", "What does `Vec::push` do?"]
    chat = lambda text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    defaults = ["Ownership is", "The borrow checker", "To build a package, run", "A trait is", "When a thread panics,"]
    for prompt in prompts or defaults + [chat(text) for text in asked]:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        drawn = {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature > 0 else {"do_sample": False}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, **drawn)
        print(f"--- {prompt!r}\n{tokenizer.decode(made[0, ids.shape[1]:])}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the demo checkpoint in assets/demo/.")
    parser.add_argument("step", choices=["prepare", "train", "export", "sample"])
    parser.add_argument("--work", type=Path, help="folder outside the repository for what is in between")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "demo")
    parser.add_argument("--html", type=Path, help="the documentation; default: that of the rustc in PATH")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock time to train for")
    parser.add_argument("--resume", action="store_true", help="start from the weights in --work")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps, to measure speed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast; faster with AVX-512 BF16")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=6144, help="tokens a step")
    parser.add_argument("--micro", type=int, default=1024, help="tokens a forward pass")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--window-long", type=int, default=1024)
    parser.add_argument("--long-from", type=float, default=0.88, help="share of the time after which windows are long")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--prompt", action="append", default=[], help="for sample; may be repeated")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    if args.step != "sample" and args.work is None:
        parser.error("--work is needed")
    if args.step == "prepare":
        sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
        prepare(args.work, args.html or Path(sysroot) / "share/doc/rust/html")
    elif args.step == "train":
        train(args)
    elif args.step == "export":
        export(args.work, args.out)
    else:
        sample(args.out, args.prompt, args.temperature)
    return 0


if __name__ == "__main__":
    sys.exit(main())
