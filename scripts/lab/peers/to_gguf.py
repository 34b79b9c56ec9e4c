"""Writes a Hugging Face folder as a GGUF file for llama-bench and llama-server.

usage: to_gguf.py HF_FOLDER OUT.gguf

Reads a Llama, a Qwen3, an OLMoE or a Qwen3 mixture in bf16, and a gpt-oss whose experts are in MXFP4, which stay as
they are. Only what speed needs: shapes, weights, rope (without its scaling) and the vocabulary, by which llama-server
turns token ids into text. GGUF's `llama` architecture expects the interleaved rotary layout: query and key rows are
reordered to it from the half-split one of Hugging Face checkpoints, which the other architectures keep. The experts of
a layer are one tensor `(experts, rows, columns)`; one layer's are in memory at a time.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "olmoe": "olmoe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
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
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
# All experts of a layer; the rows of gate and up take turns.
STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)")
BF16, MXFP4 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.MXFP4


@dataclass
class Written:
    """A tensor of the new file; `make` gives its numbers when they are written."""

    name: str
    # Of floats if `form` is none, or else of bytes.
    shape: tuple[int, ...]
    form: gguf.GGMLQuantizationType | None
    make: Callable[[], np.ndarray]

    @property
    def numbers(self) -> np.dtype:
        return np.dtype(np.float32 if self.form is None else np.uint8)


def gguf_name(name: str, architecture: str) -> str:
    stem, ending = (name, "weight") if name.endswith(".sinks") else name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        of_mlp = architecture == "gpt-oss" and rest == "post_attention_layernorm"
        return f"blk.{layer}.{'post_attention_norm' if of_mlp else NAMES[rest]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    out, width = rows.shape
    return rows.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def tensors(path: Path):
    """Name and numbers, in their shape, of each tensor of a file: bf16 bit patterns as uint16, or bytes."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(raw[:8].view(np.uint64)[0])
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        numbers = {"BF16": np.uint16, "U8": np.uint8}.get(entry["dtype"])
        assert numbers, f"{name} is {entry['dtype']}, neither BF16 nor U8"
        begin, end = (start + offset for offset in entry["data_offsets"])
        yield name, raw[begin:end].view(numbers).reshape(entry["shape"])


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def of_floats(name: str, bits: np.ndarray) -> Written:
    return Written(name, bits.shape, None, lambda: floats(bits))


def of_bits(name: str, bits: np.ndarray, order: Callable[[np.ndarray], np.ndarray] = lambda bits: bits) -> Written:
    shape = (*bits.shape[:-1], 2 * bits.shape[-1])
    return Written(name, shape, BF16, lambda: np.ascontiguousarray(order(bits)).view(np.uint8))


def of_experts(name: str, experts: list[np.ndarray]) -> Written:
    rows, columns = experts[0].shape
    return Written(name, (len(experts), rows, 2 * columns), BF16, lambda: np.stack(experts).view(np.uint8))


def mxfp4_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 32 numbers: the scale, then bytes with number i below number i + 16, where the checkpoint's bytes have
    two neighbours each."""
    lower, upper = codes & 15, codes >> 4
    apart = np.stack([lower, upper], axis=-1).reshape(*codes.shape[:-1], 32)
    bytes_of_halves = apart[..., :16] | apart[..., 16:] << 4
    blocks = np.concatenate([scales[..., None], bytes_of_halves], axis=-1)
    return np.ascontiguousarray(blocks.reshape(*scales.shape[:-1], -1))


def of_blocks(name: str, codes: np.ndarray, scales: np.ndarray) -> Written:
    shape = (*scales.shape[:-1], 17 * scales.shape[-1])
    return Written(name, shape, MXFP4, lambda: mxfp4_blocks(codes, scales))


def stacked(layer: str, parts: str, found: dict[str, np.ndarray]) -> list[Written]:
    """The tensors of a layer's experts in MXFP4."""
    turns = [("ffn_gate_exps", slice(0, None, 2)), ("ffn_up_exps", slice(1, None, 2))]
    written = []
    for name, rows in turns if parts == "gate_up" else [("ffn_down_exps", slice(None))]:
        stem = f"blk.{layer}.{name}"
        written.append(of_blocks(f"{stem}.weight", found["blocks"][:, rows], found["scales"][:, rows]))
        written.append(of_floats(f"{stem}.bias", found["bias"][:, rows]))
    return written


def written_tensors(folder: Path, architecture: str, heads: dict[str, int]) -> list[Written]:
    written: list[Written] = []
    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    stacks: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, bits in tensors(path):
            if of_one := EXPERT.fullmatch(name):
                layer, expert, part = of_one.groups()
                experts.setdefault((layer, part), {})[int(expert)] = bits
            elif of_all := STACKED.fullmatch(name):
                layer, parts, kind = of_all.groups()
                stacks.setdefault((layer, parts), {})[kind] = bits
            elif bits.ndim == 1 or ".mlp.gate.weight" in name or ".mlp.router." in name:
                written.append(of_floats(gguf_name(name, architecture), bits))
            else:
                turned = heads.get(name.split(".")[-2]) if architecture == "llama" else None
                order = (lambda bits, heads=turned: interleave(bits, heads)) if turned else (lambda bits: bits)
                written.append(of_bits(gguf_name(name, architecture), bits, order))
    for (layer, part), of_layer in experts.items():
        ordered = [of_layer[expert] for expert in range(len(of_layer))]
        written.append(of_experts(f"blk.{layer}.ffn_{part}_exps.weight", ordered))
    for (layer, parts), found in stacks.items():
        written += stacked(layer, parts, found)
    return written


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


def sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])


def main() -> None:
    folder, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    assert architecture, f"{config['model_type']}: only {', '.join(ARCHITECTURES)}"
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary(writer, folder, config)
    sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    written = written_tensors(folder, architecture, heads)
    for tensor in written:
        size = int(np.prod(tensor.shape)) * tensor.numbers.itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, tensor.numbers, size, raw_dtype=tensor.form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in written:
        writer.write_tensor_data(tensor.make())
    writer.close()


if __name__ == "__main__":
    main()
