"""Writes the config.json of a published mixture with fewer layers, for `cleave synth --config`.

usage: mixtures.py NAME LAYERS FILE       (NAME: olmoe-1b-7b, qwen3-30b-a3b, gpt-oss-20b)

All layers of such a model are alike, or take turns. The vocabulary is divided by the same number as the layers, so that
the head has the share of a step that it has in the whole model.
"""

import json
import sys
from pathlib import Path

COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
MIXTURES = {
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}
# Vocabularies are multiples of this.
VOCABULARY_UNIT = 64


def main() -> None:
    name, layers, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if name not in MIXTURES:
        sys.exit(f"{name}: there are {', '.join(MIXTURES)}")
    config = COMMON | MIXTURES[name]
    whole = config["num_hidden_layers"]
    if not 0 < layers <= whole:
        sys.exit(f"{name} has 1 to {whole} layers, not {layers}")
    units = config["vocab_size"] * layers // whole // VOCABULARY_UNIT
    config |= {"num_hidden_layers": layers, "vocab_size": max(units, 1) * VOCABULARY_UNIT}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    file.write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
