#!/usr/bin/env python3
"""Writes testdata/vectors/: embeddings and scores of a reference, for checkpoints that goldens.py made.

Embeddings are those of `sentence-transformers`: its modules Transformer, Pooling and, for some, Normalize around the
checkpoint in float32. Scores are computed as the model card of Qwen3-Reranker describes it: system turn, instruction,
query and document, an assistant's turn with empty reasoning, and the softmax of the logits of two words after it.

    name        vectors           differs in
    qwen3       normalised        also cut to `dimensions` (truncate_dim), and scores of pairs
    granite     as they are       a factor of the logits, which must not reach the vectors

The tokenizers of these checkpoints have neither "yes" nor "no" as one token, so the words are "y" and "n".

NAME.json:
    reference   versions of torch, transformers, tokenizers and sentence_transformers that made the file
    texts       the inputs: plain, one token, other scripts, spaces at both ends, long, a special token
    prompts     their tokens
    normalised  whether every vector has length 1
    poolings    {lasttoken | mean | cls: a vector for each text}
    dimensions, cut     (qwen3) the length of cut vectors, and {pooling: a vector for each text} of that length
    words, pairs        (qwen3) [negative, positive], and {instruction?, query, document, score} of each pair

Usage:
    pip install -r scripts/models/requirements.txt
    python scripts/models/vector_goldens.py            # (re)writes testdata/vectors/
    python scripts/models/vector_goldens.py --check    # computes them again and compares

Nothing is downloaded.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldens import close

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"
TOLERANCE = 2e-4
DIGITS = 6

TEXTS = [
    "A vector is a list of numbers.",
    "x",
    "Größe, é 漢字 🦀, Привет!",
    "  two spaces before, a line after\n",
    "Every block of memory has one owner, and every owner gives it back. " * 8,
    "before<|endoftext|>after",
]
POOLINGS = ["lasttoken", "mean", "cls"]
# Transformer's outputs in sentence-transformers, for a folder whose files name no other: the text itself is embedded,
# without the tokenizer's chat template.
TEXT_ALONE = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
DIMENSIONS = 24

WORDS = ["n", "y"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
PREFIX = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PAIRS = [
    {"query": "capital of France", "document": "Paris is the capital."},
    {"query": "capital of France", "document": "A queue without a limit is a yard full of letters."},
    {"query": "who owns a block?", "document": "Größe 漢字 🦀", "instruction": "Find the owner"},
    {"query": "x", "document": "y", "instruction": "z"},
    {"query": " spaces ", "document": "\nlines\n\n"},
]


@torch.no_grad()
def vectors(name: str, pooling: str, normalised: bool, dimensions: int | None = None) -> list[list[float]]:
    transformer = Transformer(
        str(TESTDATA / name),
        model_kwargs={"dtype": torch.float32, "attn_implementation": "eager"},
        modality_config=TEXT_ALONE,
        module_output_name="token_embeddings",
    )
    # One text a batch is never padded, but the call asks for a token to pad with.
    transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or transformer.tokenizer.eos_token
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
    modules += [Normalize()] if normalised else []
    model = SentenceTransformer(modules=modules, device="cpu", truncate_dim=dimensions)
    # The module Normalize comes before the cut; with this flag what is left is normalised too.
    flags = {"normalize_embeddings": True} if dimensions else {}
    encoded = model.encode(TEXTS, batch_size=1, show_progress_bar=False, **flags)
    assert encoded.shape == (len(TEXTS), dimensions or transformer.get_embedding_dimension())
    return [[round(float(value), DIGITS) for value in row] for row in encoded]


@torch.no_grad()
def scores(name: str) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(TESTDATA / name)
    model = AutoModelForCausalLM.from_pretrained(TESTDATA / name, dtype=torch.float32, attn_implementation="eager").eval()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    negative, positive = tokenizer.convert_tokens_to_ids(WORDS)
    assert [[negative], [positive]] == [encode(word) for word in WORDS]
    judged = []
    for pair in PAIRS:
        instruction = pair.get("instruction", INSTRUCTION)
        asked = f"<Instruct>: {instruction}\n<Query>: {pair['query']}\n<Document>: {pair['document']}"
        prompt = encode(PREFIX) + encode(asked) + encode(SUFFIX)
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1, [negative, positive]]
        judged.append(pair | {"score": round(float(logits.softmax(0)[1]), DIGITS)})
    return judged


def goldens(name: str) -> dict:
    is_qwen = name == "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(TESTDATA / name)
    modules = (torch, transformers, tokenizers, sentence_transformers)
    found = {
        "reference": {module.__name__: module.__version__.split("+")[0] for module in modules},
        "texts": TEXTS,
        "prompts": [tokenizer.encode(text) for text in TEXTS],
        "normalised": is_qwen,
        "poolings": {pooling: vectors(name, pooling, is_qwen) for pooling in POOLINGS},
    }
    if is_qwen:
        found["dimensions"] = DIMENSIONS
        found["cut"] = {pooling: vectors(name, pooling, True, DIMENSIONS) for pooling in POOLINGS}
        found["words"] = WORDS
        found["pairs"] = scores(name)
    return found


def dump(found: dict) -> str:
    """Returns the file with a vector, a text or a pair in a line, so that a diff shows the changed ones."""
    compact = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    lines = lambda rows: "[\n" + ",\n".join(map(compact, rows)) + "\n]"
    grouped = lambda groups: "{\n" + ",\n".join(f'"{key}": {lines(rows)}' for key, rows in groups.items()) + "\n}"
    forms = {"texts": lines, "prompts": lines, "pairs": lines, "poolings": grouped, "cut": grouped}
    members = [f'"{key}": {forms.get(key, compact)(value)}' for key, value in found.items()]
    return "{\n" + ",\n".join(members) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes or checks the reference vectors under testdata/vectors/.")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    args = parser.parse_args()
    # One thread gives sums the same order on every machine of a kind.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    differing = []
    for name in ("qwen3", "granite"):
        path = TESTDATA / "vectors" / f"{name}.json"
        found = goldens(name)
        if args.check:
            kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            kept.pop("reference", None), found.pop("reference")
            differing += [] if close(kept, found, TOLERANCE) else [f"{path}: differs"]
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(dump(found), encoding="utf-8")
            print(f"{path.name}: {path.stat().st_size // 1024} KiB, tokens {[*map(len, found['prompts'])]}")
    if args.check:
        print("\n".join(differing) or "testdata matches")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
