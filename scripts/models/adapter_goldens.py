#!/usr/bin/env python3
"""Writes testdata/adapters/: LoRA adapters of checkpoints that goldens.py made, and the answers of a reference.

The reference is `peft` around `transformers` in float32 (eager attention, no KV cache): the base model stays as it is,
and each adapter's product is added to its layers' outputs. Every path is also computed with the adapter merged into the
weights; its logits must be those of the adapter within 1e-3, so that one set of goldens holds for both.

    name            base        differs in
    llama3-qv       llama3      queries and values only, rank 4, bf16
    llama3-all      llama3      all projections, rsLoRA, ranks and alphas by pattern
    llama3-third    llama3      MLPs of two of three layers, rank 40, so more than one panel of columns
    qwen2           qwen2       biases on q/k/v; "all-linear"
    phi3            phi3        fused q/k/v and gate/up
    granite         granite     factors of outputs and logits
    cohere          cohere      neighbours rotated, parallel parts
    gemma2          gemma2      norms on both sides, a tanh gate
    olmo2           olmo2       no norms of inputs
    qwen3-moe       qwen3-moe   attention beside experts
    qwen3-moe-params qwen3-moe  parameters of all experts, in one tensor each, beside queries and values
    qwen3-moe-each  qwen3-moe   a module for each expert, as older classes have them; the reference converts it
    mixtral-params  mixtral     parameters of experts whose module has another name in the checkpoint
    gpt-oss-params  gpt-oss     parameters with inputs before outputs, rows of gate and up in turn

Each folder is as PEFT saves it, without its README, and has a goldens.json with `reference` and `prompts` as
goldens.py describes them (fewer, and 16 tokens each).

Usage:
    pip install -r scripts/models/requirements.txt
    python scripts/models/adapter_goldens.py            # (re)writes testdata/adapters/
    python scripts/models/adapter_goldens.py --check    # computes the answers again and compares

Nothing is downloaded.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import zlib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from goldens import MARGIN_MIN, ROUTER_MARGIN_MIN, TOP, RouterMargins, close

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"
SEED = 41
TOKENS_NEW = 16
PROMPT_LENGTHS = [1, 3, 16, 17, 33, 80]
MERGED_TOLERANCE = 1e-3

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EACH = "qwen3-moe-each"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {
    "llama3-qv": ("llama3", torch.bfloat16, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "llama3-all": (
        "llama3",
        torch.float32,
        {
            "r": 8,
            "lora_alpha": 6,
            "target_modules": ATTENTION + MLP,
            "use_rslora": True,
            "rank_pattern": {"layers.1.mlp.down_proj": 3, "q_proj": 5},
            "alpha_pattern": {"up_proj": 9},
        },
    ),
    "llama3-third": (
        "llama3",
        torch.float16,
        {"r": 40, "lora_alpha": 20, "target_modules": MLP, "layers_to_transform": [0, 2]},
    ),
    "qwen2": ("qwen2", torch.float32, {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"}),
    "phi3": (
        "phi3",
        torch.bfloat16,
        {"r": 6, "lora_alpha": 6, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    "granite": ("granite", torch.float32, {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP}),
    "cohere": ("cohere", torch.float32, {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION + MLP}),
    "gemma2": ("gemma2", torch.float32, {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION + MLP}),
    "olmo2": ("olmo2", torch.float32, {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION + MLP}),
    "qwen3-moe": ("qwen3-moe", torch.float32, {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION}),
    "qwen3-moe-params": (
        "qwen3-moe",
        torch.float32,
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": PARAMETERS,
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
    ),
    EACH: (
        "qwen3-moe",
        torch.bfloat16,
        {"r": 3, "lora_alpha": 3, "target_modules": MLP, "layers_to_transform": [1, 2]},
    ),
    "mixtral-params": (
        "mixtral",
        torch.bfloat16,
        {"r": 2, "lora_alpha": 2, "target_modules": [], "target_parameters": PARAMETERS[:1]},
    ),
    "gpt-oss-params": (
        "gpt-oss",
        torch.float32,
        {"r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "target_parameters": PARAMETERS},
    ),
}


def base_model(base: str):
    model = AutoModelForCausalLM.from_pretrained(
        TESTDATA / base, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write_adapter(name: str, folder: Path) -> None:
    base, dtype, options = ADAPTERS[name]
    has_parameters = "target_parameters" in options or name == EACH
    dropout = 0.0 if has_parameters else 0.1
    model = get_peft_model(base_model(base), LoraConfig(task_type="CAUSAL_LM", lora_dropout=dropout, **options))
    generator = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
    for parameter_name, parameter in sorted(model.named_parameters()):
        if "lora_" in parameter_name:
            # Large enough that the adapter decides the next token: its product is about as large as the layer's.
            # Of a parameter of all experts each reads its own ranks alone.
            is_of_experts = ".experts." in parameter_name and "lora_B" in parameter_name
            ranks = options["r"] if is_of_experts else parameter.shape[1]
            noise = torch.randn(parameter.shape, generator=generator) / math.sqrt(ranks)
            parameter.data = noise.to(dtype)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    if name == EACH:
        write_each_expert(folder, model.config, dtype, options, generator)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    for key, value in config.items():
        # PEFT keeps lists of modules as sets, whose order changes.
        if isinstance(value, list):
            config[key] = sorted(value)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def write_each_expert(folder: Path, model, dtype, options: dict, generator) -> None:
    """Writes what older releases wrote, whose classes had a module for each expert and projection."""
    hidden, width, rank = model.hidden_size, model.moe_intermediate_size, options["r"]
    noise = lambda *shape: (torch.randn(shape, generator=generator) / math.sqrt(shape[1])).to(dtype)
    tensors = {}
    for layer in options["layers_to_transform"]:
        for expert in range(model.num_experts):
            for module in MLP:
                rows, columns = (hidden, width) if module == "down_proj" else (width, hidden)
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{module}"
                tensors[f"{name}.lora_A.weight"] = noise(rank, columns)
                tensors[f"{name}.lora_B.weight"] = noise(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.update(target_modules=MLP, target_parameters=None, rank_pattern={}, alpha_pattern={}, peft_version="0.16.0")
    file.write_text(json.dumps(config), encoding="utf-8")


@torch.no_grad()
def last_logits(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def greedy(model, merged, base, margins: RouterMargins, prompt: list[int]) -> dict | None:
    """Returns the greedy path; None if a margin is too small, or the base model alone takes the same path."""
    tokens, margin_min, first, last, differs = list(prompt), math.inf, None, None, False
    margins.smallest = math.inf
    for _ in range(TOKENS_NEW):
        logits = last_logits(model, tokens)
        difference = float((logits - last_logits(merged, tokens)).abs().max())
        assert difference <= MERGED_TOLERANCE, f"the merged model differs by {difference}"
        values, ids = logits.topk(TOP)
        margin_min = min(margin_min, float(values[0] - values[1]))
        if margin_min <= MARGIN_MIN or margins.smallest <= ROUTER_MARGIN_MIN:
            return None
        differs |= int(last_logits(base, tokens).argmax()) != int(ids[0])
        last = [[int(i), round(float(v), 5)] for i, v in zip(ids, values)]
        first = first or last
        tokens.append(int(ids[0]))
    if not differs:
        return None
    path = {"tokens": tokens[len(prompt) :], "margin_min": round(margin_min, 5)}
    return path | {"first_top_logits": first, "last_top_logits": last}


def goldens(name: str, folder: Path) -> dict:
    base, _, _ = ADAPTERS[name]
    model = PeftModel.from_pretrained(base_model(base), folder, torch_device="cpu").float().eval()
    merged = PeftModel.from_pretrained(base_model(base), folder, torch_device="cpu").float().merge_and_unload().eval()
    plain, margins = base_model(base), RouterMargins(model)
    cases = []
    for index, length in enumerate(PROMPT_LENGTHS):
        for attempt in range(1000):
            rng = random.Random(f"{SEED} {name} {index} {attempt}")
            prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
            path = greedy(model, merged, plain, margins, prompt)
            if path is not None:
                cases.append({"prompt_tokens": prompt} | path)
                break
        else:
            raise SystemExit(f"{name}: no prompt of {length} tokens has a clear greedy path")
    versions = {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, peft)}
    return {"reference": versions, "prompts": cases}


def dump(found: dict) -> str:
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    lines = ",\n".join(compact(case) for case in found["prompts"])
    return f'{{\n"reference": {compact(found["reference"])},\n"prompts": [\n{lines}\n]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compute the answers again and compare")
    parser.add_argument("--only", choices=ADAPTERS, help="one adapter")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    wrong = []
    for name in [options.only] if options.only else ADAPTERS:
        folder = TESTDATA / "adapters" / name
        if not options.check:
            write_adapter(name, folder)
        found = goldens(name, folder)
        file = folder / "goldens.json"
        if options.check:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if not close(kept["prompts"], found["prompts"]):
                wrong.append(name)
        else:
            file.write_text(dump(found), encoding="utf-8")
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: {size // 1024} KiB, smallest margin {min(case['margin_min'] for case in found['prompts'])}")
    if wrong:
        sys.exit(f"differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
