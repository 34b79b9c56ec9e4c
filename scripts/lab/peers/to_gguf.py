"""Writes a Hugging Face folder of a Llama or a Qwen3 as a bf16 GGUF file for llama-bench and llama-server.

usage: to_gguf.py HF_FOLDER OUT.gguf

Only what speed needs: shapes, weights, rope (without its scaling) and the vocabulary, by which llama-server turns token
ids into text. GGUF's `llama` architecture expects the interleaved rotary layout: query and key rows are reordered to it
from the half-split one of Hugging Face checkpoints, which `qwen3` keeps.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[stem]}.weight"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    out, width = rows.shape
    return rows.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def tensors(path: Path):
    """Name and bf16 bit patterns, `(rows, width)` or `(width)` as uint16, of each tensor of a file."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(raw[:8].view(np.uint64)[0])
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, not BF16"
        begin, end = (start + offset for offset in entry["data_offsets"])
        yield name, raw[begin:end].view(np.uint16).reshape(entry["shape"])


def vocabulary(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    """The byte-level BPE of tokenizer.json, or none where the folder has another kind."""
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text()) if path.exists() else {}
    bpe = model.get("model", {})
    if bpe.get("type") != "BPE" or (model.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        writer.add_tokenizer_model("none")
        return
    size = config["vocab_size"]
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for token, number in bpe["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in model["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos if isinstance(eos, int) else eos[0])
    writer.add_add_bos_token(False)


def main() -> None:
    folder, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    assert architecture in ("llama", "qwen3"), f"{architecture}: only llama and qwen3"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary(writer, folder, config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for path in sorted(folder.glob("*.safetensors")):
        for name, bits in tensors(path):
            if bits.ndim == 1:
                values = (bits.astype(np.uint32) << 16).view(np.float32)
                writer.add_tensor(gguf_name(name), values)
                continue
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                bits = interleave(bits, heads if ".q_proj." in name else kv_heads)
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


if __name__ == "__main__":
    main()
