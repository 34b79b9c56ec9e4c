#!/usr/bin/env python3
"""Writes the reference goldens under testdata/: tiny checkpoints, and the answers of a reference.

For each architecture Cleave loads there is a folder in the Hugging Face layout with seeded random weights of a few
hundred kilobytes, and a `goldens.json` with the answers of `transformers` in float32 (eager attention, the whole
sequence recomputed for every token, no KV cache). The variants differ on purpose in what real checkpoints differ in:

    name        attention, weights          written as
    llama2      MHA, untied, f32            old spelling (rope_theta, torch_dtype), leftover rotary_emb.inv_freq tensors
    llama3      GQA, tied, bf16, 3 shards   old spelling, llama3 rope scaling, eos list, template with the tokenizer
    llama3-new  GQA, untied, f16            new spelling (rope_parameters, dtype), chat_template.jinja
    mistral     GQA, untied, bf16           sliding window of 24, head_dim 32 beside hidden / heads = 16
    olmo2       GQA, untied, bf16           norms of outputs, q/k norms over whole projections, q/k/v/o biases
    qwen2       GQA, tied, bf16             q/k/v biases, a sliding_window that use_sliding_window switches off
    qwen2.5     MHA, untied, f32, 2 shards  q/k/v biases, vocabulary padded beyond the tokenizer's
    qwen3       GQA, tied, bf16             q/k norms, explicit head_dim, new spelling, template with thinking
    smollm3     GQA, tied, bf16             no rotary embedding in every second layer
    seed-oss    GQA, untied, bf16           q/k/v biases, head_dim 32 beside hidden / heads = 12, new spelling
    granite     GQA, tied, bf16             four factors, none of them 1
    granite4    GQA, tied, bf16             the same with a fused gate, as a hybrid without states and experts
    ministral3  GQA, untied, bf16           yarn with mscale, queries that grow with their position, new spelling
    olmo3       GQA, untied, bf16           windows of 24 in every second layer, yarn in the others only
    exaone4     GQA, untied, bf16           norms of outputs and heads, no rotary embedding without a window
    phi3        GQA, untied, bf16           fused q/k/v and gate/up, sliding window of 24
    phi4-mini   GQA, tied, bf16             the same without a window, longrope over three quarters of a head
    phi4-mini-short GQA, tied, bf16         the same within its original context, so with the short factors
    glm4        GQA, untied, bf16           norms on both sides, neighbours of half a head rotated, q/k/v biases
    cohere      GQA, tied, bf16             norms that remove the mean, parallel parts, neighbours rotated
    cohere2     GQA, tied, bf16             the same with windows of 24, the only layers that rotate
    gemma2      GQA, tied, bf16             norms on both sides, less one, caps of scores and logits
    gemma3      GQA, untied, bf16           norms on both sides and of heads, all less one; two rotary embeddings
    gemma3-images   GQA, tied, bf16         the same in a class that reads images, most keys left to the class
    qwen3-moe   GQA, untied, bf16           3 of 8 experts after a dense layer, weights normalised, head_dim 32
    mixtral     GQA, tied, f32              2 of 6 experts, names w1, w3, w2
    olmoe       GQA, untied, bf16           3 of 8 experts, weights not normalised, q/k norms over whole projections
    qwen2-moe   GQA, tied, bf16             3 of 8 experts in every second layer, a gated shared expert, q/k/v biases
    granitemoe  GQA, tied, bf16             3 of 6 experts in one tensor a layer, four factors
    granitemoeshared  GQA, tied, bf16       the same beside a shared expert, without one of the class's keys
    granite4-moe  GQA, untied, bf16         the same as a hybrid without states, no rotary embedding
    glm4-moe    GQA, untied, bf16           4 of 9 experts in 2 of 3 groups, biased choice, a shared expert, MTP tensors
    minimax-m2  GQA, untied, bf16           3 of 8 experts by biased sigmoids, rotary_dim 12 of 32, q/k norms over all
    gpt-oss     GQA, untied, bf16           2 of 6 experts with biases and a clamped gate, sinks, windows, yarn
    mistral-small3  GQA, untied, bf16       Mistral in a class that reads images, names in their old spelling

No norm is one (or zero where a class adds one) and no bias is zero, so that a forgotten one shows. Rows of
the vocabulary beyond the tokenizer are random too, so a greedy path may visit ids that decode to nothing.

goldens.json:
    reference   versions of torch, transformers and tokenizers that made the file
    prompts     20 of {prompt_tokens, text?, tokens, margin_min, first_top_logits, last_top_logits}
                tokens: 32 greedy tokens, end-of-sequence ignored. first_top_logits: [[id, logit] x 20], descending, at
                the last prompt position (its first id is tokens[0]); last_top_logits: the same where tokens[31] was
                chosen. margin_min: the smallest top-1 to top-2 distance of the path; prompts below 2e-3 are redrawn,
                so a logit tolerance of 1e-3 cannot flip a token. router_margin_min, where there are experts: the
                smallest distance between a chosen expert (or group) and one that is not, in logits, or in biased
                scores where the choice has a bias; prompts below 2e-4 are redrawn. text, where present, encodes to
                prompt_tokens.
    tokenizer   encode: {text, ids, ids_with_special, decoded}   (ids: no special token is added; decoded: from ids,
                special tokens kept); decode: {ids, text, text_without_special}
    chat        {messages, tools?, kwargs?, add_generation_prompt, rendered, ids} or {..., error}; kwargs are further
                template variables; ids encode `rendered` with no special token added

Usage:
    pip install -r scripts/models/requirements.txt
    python scripts/models/goldens.py            # (re)writes testdata/
    python scripts/models/goldens.py --check    # regenerates into a temporary folder and compares
    python scripts/models/goldens.py --only qwen3

Licence: weights, tokenizers, templates and texts are all made by this script and carry the repository's licence.
Nothing is downloaded.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from goldens_variants import TEXT, TOKENIZER_TEXTS, VARIANTS, Variant

SEED = 20
TOKENS_NEW = 32
TOP = 20
MARGIN_MIN = 2e-3
ROUTER_MARGIN_MIN = 2e-4
DISTINCT_MIN = 14
# Lengths around KV blocks of 16 and 32, the sliding window of 24 and the rope's original length of 64.
PROMPT_LENGTHS = [1, 2, 3, 7, 15, 16, 17, 23, 25, 31, 32, 33, 48, 63, 65, 80, 97, 113, 128, 150]
TEXT_PROMPTS = {3, 5, 8, 10, 12, 14, 15, 17, 19}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# === Checkpoints ===


def auto_class(variant: Variant):
    return AutoModelForImageTextToText if variant.reads_images else AutoModelForCausalLM


def random_weights(variant: Variant, folder: Path) -> dict[str, torch.Tensor]:
    """Returns seeded float32 weights, so large that the layers decide the next token, not the token's own embedding."""
    with torch.device("meta"):
        model = auto_class(variant).from_config(AutoConfig.from_pretrained(folder))
    names = {name: p.shape for name, p in model.named_parameters()}
    # Biases of routers' choices are buffers that a checkpoint has.
    kept = model.state_dict()
    names |= {name: buffer.shape for name, buffer in model.named_buffers() if name in kept}
    generator = torch.Generator().manual_seed(SEED + zlib.crc32(variant.name.encode()))
    weights = {}
    for name, size in sorted(names.items()):
        noise = torch.randn(size, generator=generator)
        if name.endswith(".weight") and len(size) == 1:
            weights[name] = variant.norm_center + 0.3 * noise
        elif name.endswith((".bias", "_bias")):
            weights[name] = 0.5 * noise
        elif name.endswith(".sinks"):
            weights[name] = 1.0 + noise
        elif "embed_tokens" in name or "lm_head" in name:
            weights[name] = 0.4 * noise
        else:
            has_experts_first = len(size) == 3 and not name.endswith(variant.transposed)
            inner = size[2] if has_experts_first else size[1]
            weights[name] = noise * (1.4 / math.sqrt(inner))
    if not any(".experts." in name for name in weights):
        return weights
    # transformers has all experts of a layer in one parameter; the file has what is published.
    return revert_weight_conversion(model, weights)


def write_weights(variant: Variant, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    dtype = DTYPES[variant.dtype]
    weights = {stored_name(variant, name): tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    if variant.leftover_inv_freq:
        # Checkpoints converted before transformers 4.32 carry these buffers; a loader must ignore them.
        head_dim = variant.config["hidden_size"] // variant.config["num_attention_heads"]
        inv_freq = 1.0 / variant.config["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        for layer in range(variant.config["num_hidden_layers"]):
            weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = inv_freq.clone()
    for name, size in variant.leftovers.items():
        weights[name] = torch.full(size, 0.125, dtype=dtype)
    metadata = {"format": "pt"}
    if variant.shards == 1:
        save_file(weights, folder / "model.safetensors", metadata)
        return
    names = list(weights)
    # Shards of nearly equal tensor counts: a layer's tensors lie in two files, as in real checkpoints.
    bounds = [len(names) * i // variant.shards for i in range(variant.shards + 1)]
    weight_map = {}
    for shard in range(variant.shards):
        file = f"model-{shard + 1:05}-of-{variant.shards:05}.safetensors"
        chosen = {name: weights[name] for name in names[bounds[shard] : bounds[shard + 1]]}
        save_file(chosen, folder / file, metadata)
        weight_map |= dict.fromkeys(chosen, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def stored_name(variant: Variant, name: str) -> str:
    for beginning, stored in variant.renames:
        if name.startswith(beginning):
            return stored + name.removeprefix(beginning)
    return name


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(variant: Variant, folder: Path) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", variant.config)
    write_json(folder / "generation_config.json", variant.generation_config)
    tokenizer_config = dict(variant.tokenizer_config)
    if variant.template_in_file:
        (folder / "chat_template.jinja").write_text(variant.template, encoding="utf-8")
    else:
        tokenizer_config["chat_template"] = variant.template
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    variant.tokenizer.save(str(folder / "tokenizer.json"))
    weights = random_weights(variant, folder)
    for part, factor in variant.factors.items():
        weights |= {name: factor * tensor for name, tensor in weights.items() if part in name}
    write_weights(variant, folder, weights)


# === Goldens ===


class RouterMargins:
    """The smallest distance between an expert that a router chose and one that it did not, over a path.

    A device that sums in another order could choose the other expert if both were nearly equal, and would be right.
    """

    def __init__(self, model):
        self.smallest = math.inf
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        self.has_routers = bool(routers)
        for router in routers:
            router.register_forward_hook(self.measure)

    def measure(self, router, inputs, output) -> None:
        scores = output[0].float()
        # Routers whose choice a bias changes choose by sigmoids; the order of the others is that of the logits.
        bias = getattr(router, "e_score_correction_bias", inputs[1] if len(inputs) > 1 else None)
        if bias is not None:
            scores = scores.sigmoid() + bias
        groups, groups_chosen = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
        if groups_chosen < groups:
            by_group = scores.view(-1, groups, scores.shape[-1] // groups)
            group_scores = by_group.topk(2, dim=-1)[0].sum(dim=-1)
            self.add(group_scores, groups_chosen)
            chosen = torch.zeros_like(group_scores).scatter(1, group_scores.topk(groups_chosen, dim=-1)[1], 1.0)
            scores = by_group.masked_fill(chosen.unsqueeze(-1) == 0, -math.inf).view(scores.shape)
        self.add(scores, router.top_k)

    def add(self, scores: torch.Tensor, chosen: int) -> None:
        ordered = scores.sort(dim=-1, descending=True)[0]
        self.smallest = min(self.smallest, float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))


@torch.no_grad()
def greedy(model, margins: RouterMargins, prompt: list[int]) -> dict | None:
    """Returns the greedy path and its logits, or None if a margin is too small or the path repeats few tokens."""
    tokens, margin_min, first, last = list(prompt), math.inf, None, None
    margins.smallest = math.inf
    for _ in range(TOKENS_NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if margins.smallest <= ROUTER_MARGIN_MIN:
            return None
        values, ids = logits.topk(TOP)
        margin_min = min(margin_min, float(values[0] - values[1]))
        if margin_min <= MARGIN_MIN:
            return None
        last = [[int(i), round(float(v), 5)] for i, v in zip(ids, values)]
        first = first or last
        tokens.append(int(ids[0]))
    generated = tokens[len(prompt) :]
    if len(set(generated)) < DISTINCT_MIN:
        return None
    path = {"tokens": generated, "margin_min": round(margin_min, 5), "first_top_logits": first, "last_top_logits": last}
    return path | ({"router_margin_min": round(margins.smallest, 6)} if margins.has_routers else {})


def draw_text(tokenizer: Tokenizer, rng: random.Random, length: int) -> str:
    """Returns a piece of TEXT of about `length` tokens, from a word or from the space before it."""
    starts = [i for i, c in enumerate(TEXT[: len(TEXT) * 3 // 4]) if c.isspace()]
    start = rng.choice(starts) + rng.randrange(2)
    end = start + 1
    while end < len(TEXT) and len(tokenizer.encode(TEXT[start : end + 1], add_special_tokens=False).ids) <= length:
        end += 1
    return TEXT[start:end]


def prompts(variant: Variant, model) -> list[dict]:
    cases, margins = [], RouterMargins(model)
    for index, length in enumerate(PROMPT_LENGTHS):
        length = max(length, variant.prompt_min)
        for attempt in range(1000):
            rng = random.Random(f"{SEED} {variant.name} {index} {attempt}")
            case = {}
            if index in TEXT_PROMPTS:
                text = draw_text(variant.tokenizer, rng, length)
                case["text"] = text
                case["prompt_tokens"] = variant.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                case["prompt_tokens"] = [rng.randrange(variant.text_config["vocab_size"]) for _ in range(length)]
            path = greedy(model, margins, case["prompt_tokens"])
            if path is not None:
                cases.append(case | path)
                break
        else:
            raise SystemExit(f"{variant.name}: no prompt of {length} tokens has a clear greedy path")
    return cases


def tokenizer_cases(variant: Variant) -> dict:
    tokenizer = variant.tokenizer
    encode, decode = [], []
    for text in TOKENIZER_TEXTS + variant.tokenizer_texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        encode.append(
            {
                "text": text,
                "ids": ids,
                "ids_with_special": tokenizer.encode(text, add_special_tokens=True).ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    rng = random.Random(f"{SEED} {variant.name} decode")
    vocab = tokenizer.get_vocab_size()
    emoji = tokenizer.encode("a🙂", add_special_tokens=False).ids
    # Half an emoji, special tokens in the middle, and random ids, which rarely are valid UTF-8 together.
    drawn = [[], [vocab - 1], emoji[:-1], emoji[:-2], emoji[1:], emoji + [vocab - 1] + emoji, [1, 2] + emoji]
    drawn += [[rng.randrange(vocab) for _ in range(count)] for count in (3, 8, 16, 32)]
    for ids in drawn:
        kept, skipped = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
        decode.append({"ids": ids, "text": kept, "text_without_special": skipped})
    return {"encode": encode, "decode": decode}


CHATS = [
    {"messages": [{"role": "user", "content": "Hello!"}]},
    {"messages": [{"role": "system", "content": "You are terse.  "}, {"role": "user", "content": "  Who owns a block?\n"}]},
    {
        "messages": [
            {"role": "user", "content": "你好 🙂"},
            {"role": "assistant", "content": " Hello.\n\nHow can I help? "},
            {"role": "user", "content": "Quote \"this\" <b>&</b> {{ that }} {% raw %}"},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Line one.\nLine two."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
        ]
    },
]


def chat_cases(variant: Variant, folder: Path) -> list[dict]:
    reference = AutoTokenizer.from_pretrained(folder)
    cases = []
    for chat in CHATS + variant.chat_extra:
        for add_generation_prompt in (True, False):
            case = chat | {"add_generation_prompt": add_generation_prompt}
            options = {"tools": chat.get("tools"), "add_generation_prompt": add_generation_prompt} | chat.get("kwargs", {})
            try:
                rendered = reference.apply_chat_template(chat["messages"], tokenize=False, **options)
            except Exception as error:  # jinja2's TemplateError, whatever the version wraps it in
                cases.append(case | {"error": str(error)})
                continue
            ids = reference.apply_chat_template(chat["messages"], tokenize=True, return_dict=False, **options)
            assert ids == variant.tokenizer.encode(rendered, add_special_tokens=False).ids
            cases.append(case | {"rendered": rendered, "ids": ids})
    return cases


def dump_goldens(goldens: dict) -> str:
    """Returns goldens.json with one case in a line, so that a diff shows the changed cases."""
    compact = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    lines = lambda cases: "[\n" + ",\n".join(compact(case) for case in cases) + "\n]"
    parts = [
        f'"reference": {compact(goldens["reference"])}',
        f'"prompts": {lines(goldens["prompts"])}',
        f'"tokenizer": {{\n"encode": {lines(goldens["tokenizer"]["encode"])},\n'
        f'"decode": {lines(goldens["tokenizer"]["decode"])}\n}}',
        f'"chat": {lines(goldens["chat"])}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def generate(name: str, out: Path) -> None:
    variant = VARIANTS[name]()
    folder = out / name
    write_checkpoint(variant, folder)
    # The reference reads the stored weights: 16-bit numbers are widened.
    model, loading = auto_class(variant).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert set(loading.pop("unexpected_keys")) == set(variant.leftovers), f"{name}: leftovers"
    assert not any(loading.values()), f"{name}: the reference could not load all it was given: {loading}"
    model.eval()
    goldens = {
        "reference": {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, tokenizers)},
        "prompts": prompts(variant, model),
        "tokenizer": tokenizer_cases(variant),
        "chat": chat_cases(variant, folder),
    }
    (folder / "goldens.json").write_text(dump_goldens(goldens), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    margin = min(case["margin_min"] for case in goldens["prompts"])
    print(f"{name}: {size // 1024} KiB, {len(goldens['chat'])} chats, smallest margin {margin}")


# === Check ===


def differences(kept: Path, fresh: Path) -> list[str]:
    """Compares files byte by byte, but goldens.json by value: logits may differ in the fifth digit between machines."""
    names = {file.name for file in kept.iterdir()} | {file.name for file in fresh.iterdir()}
    found = []
    for name in sorted(names):
        a, b = kept / name, fresh / name
        if not (a.exists() and b.exists()):
            found.append(f"{a}: only on one side")
        elif name == "goldens.json":
            left, right = (json.loads(file.read_text(encoding="utf-8")) for file in (a, b))
            left.pop("reference"), right.pop("reference")
            if not close(left, right):
                found.append(f"{a}: goldens differ")
        elif a.read_bytes() != b.read_bytes():
            found.append(f"{a}: bytes differ")
    return found


def close(a, b, tolerance: float = 5e-4) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(*pair, tolerance) for pair in zip(a, b))
    if isinstance(a, float) or isinstance(b, float):
        return abs(a - b) <= tolerance
    return a == b


def check(names: list[str], out: Path) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        found = []
        for name in names:
            generate(name, Path(temporary))
            found += differences(out / name, Path(temporary) / name) if (out / name).is_dir() else [f"{out / name}: missing"]
    print("\n".join(found) or "testdata matches")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes or checks the reference goldens under testdata/.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "testdata")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="one variant; may be repeated")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    args = parser.parse_args()
    # One thread gives sums the same order on every machine of a kind.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = args.only or list(VARIANTS)
    if args.check:
        return check(names, args.out)
    for name in names:
        shutil.rmtree(args.out / name, ignore_errors=True)
        generate(name, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
