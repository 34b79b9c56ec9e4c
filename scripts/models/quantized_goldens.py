#!/usr/bin/env python3
"""Writes testdata/quantized/: one tiny model in every quantised layout that Cleave reads, and its weights in float32.

Each folder has config.json, model.safetensors, and expected.safetensors: every projection in float32, computed from
the numbers before they were packed. Packing follows the loops of the software that writes such checkpoints (AutoAWQ's
WQLinear_GEMM.from_linear, AutoGPTQ's QuantLinear.pack, compressed-tensors' pack_to_int32 and pack_fp4_to_uint8), in
numpy; conversions to fp8, fp4, powers of two and bf16 are ml_dtypes'. Nothing of Cleave is used, so a mistake in how
Cleave reads a layout shows.

    name             layout
    fp8-tensor       compressed-tensors, float 8, one scale a matrix, input scales beside
    fp8-channel      compressed-tensors, float 8, a bf16 scale a row, o_proj left dense
    fp8-block        fp8 with weight_block_size [24, 20], ragged at both ends, down_proj left dense
    int8-channel     compressed-tensors, int 8
    int8-group       compressed-tensors, int 8, a bf16 scale for groups of 16
    int8-packed      compressed-tensors, pack-quantized with 8 bits, zero points, groups of 16 and 40
    awq              awq, groups of 16
    gptq             gptq, groups of 32, the last one short, biases of zeros where the model has none
    gptq-int8        gptq of 8 bits, groups of 32, the last one short
    gptq-act-order   gptq_v2 with desc_act: groups by a shuffled g_idx
    int4-symmetric   compressed-tensors, pack-quantized, groups of 16
    int4-asymmetric  compressed-tensors, pack-quantized, zero points, groups of 16 and 40
    mxfp8            compressed-tensors, float 8, powers of two for groups of 32, down_proj left dense
    mxfp4            compressed-tensors, float 4, powers of two for groups of 32, down_proj left dense
    nvfp4            compressed-tensors, float 4, float 8 for groups of 16, divided by one number a matrix
    modelopt-nvfp4   modelopt, the same multiplied with one number; described in hf_quant_config.json alone
    modelopt-mixed   modelopt, float 8 with scales a matrix, a row and for groups of 32, and float 4 beside
    mxfp4-gpt-oss    mxfp4 of gpt-oss: experts in one tensor, rows of gate and up in turn; expected.safetensors has them
                     (experts, out, in)

Usage:
    pip install numpy ml_dtypes
    python scripts/models/quantized_goldens.py            # (re)writes testdata/quantized/
    python scripts/models/quantized_goldens.py --check    # regenerates and compares

Weights are made by this script and carry the repository's licence.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import ml_dtypes
import numpy as np

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 80, 2, 1, 16, 16
PROJECTIONS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        end = len(data) + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(tensors[name].shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def as_int32(words):
    return words.astype(np.uint32).view(np.int32)


def pack_awq(numbers):
    """Packs (any, out) of 0..15 into (any, out / 8)."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= numbers[:, column * 8 + place].astype(np.uint32) << np.uint32(4 * i)
    return as_int32(words)


def pack_straight(numbers, axis, bits=4):
    """Packs neighbours along an axis into words, the first lowest, with zeros up to a whole word."""
    each = 32 // bits
    numbers = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    pad = -numbers.shape[-1] % each
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, pad)])
    words = numbers.reshape(*numbers.shape[:-1], -1, each)
    words = sum(words[..., i] << np.uint32(bits * i) for i in range(each))
    return as_int32(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


class Random:
    """The weights, scales and codes of one folder."""

    def __init__(self, name):
        self.numbers = np.random.default_rng(list(name.encode()))

    def weight(self, shape):
        return (self.numbers.normal(size=shape) * 0.2).astype(np.float32)

    def scales(self, shape, dtype):
        return self.numbers.uniform(0.002, 0.03, size=shape).astype(dtype)

    def codes(self, shape, low, high):
        return self.numbers.integers(low, high + 1, size=shape)


def wide(x):
    return x.astype(np.float32)


def fp8_tensor(random, shape):
    weight = random.weight(shape)
    scale = np.array([np.abs(weight).max() / 448], np.float32)
    codes = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    input_scale = np.array([0.01], np.float32)
    return {"weight": codes, "weight_scale": scale, "input_scale": input_scale}, wide(codes) * scale


def fp8_channel(random, shape):
    weight = random.weight(shape)
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    codes = (weight / wide(scale)).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, wide(codes) * wide(scale)


def fp8_block(random, shape, block=(24, 20)):
    weight = random.weight(shape)
    grid = [-(-size // each) for size, each in zip(shape, block)]
    scale = random.scales(grid, np.float32)
    spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
    codes = np.clip(weight / spread, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, wide(codes) * spread


def powers_of_two(random, shape, low, high):
    """Bytes of powers of two, and the powers."""
    stored = (random.codes(shape, low, high) + 127).astype(np.uint8)
    return stored, wide(stored.view(ml_dtypes.float8_e8m0fnu))


def float4(random, shape):
    """Every code of float 4, two to a byte, the first in the lower bits, and the numbers."""
    codes = random.codes(shape, 0, 15).astype(np.uint8)
    numbers = wide(codes.view(ml_dtypes.float4_e2m1fn))
    return codes[:, 0::2] | codes[:, 1::2] << 4, numbers


def mxfp8(random, shape):
    scale, wide_scale = powers_of_two(random, (shape[0], shape[1] // 32), -13, -9)
    codes = random.weight(shape) * 1500
    codes = codes.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, wide(codes) * wide_scale.repeat(32, 1)


def mxfp4(random, shape):
    scale, wide_scale = powers_of_two(random, (shape[0], shape[1] // 32), -7, -3)
    packed, numbers = float4(random, shape)
    return {"weight_packed": packed, "weight_scale": scale}, numbers * wide_scale.repeat(32, 1)


def nvfp4_parts(random, shape):
    packed, numbers = float4(random, shape)
    scale = random.numbers.uniform(20, 448, size=(shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    return packed, numbers, scale


def nvfp4(random, shape):
    packed, numbers, scale = nvfp4_parts(random, shape)
    divisor = random.numbers.uniform(3000, 9000, size=1).astype(np.float32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": divisor,
        "input_global_scale": np.array([120.0], np.float32),
    }
    return tensors, numbers * (wide(scale) / divisor).repeat(16, 1)


def modelopt_nvfp4(random, shape):
    packed, numbers, scale = nvfp4_parts(random, shape)
    factor = random.numbers.uniform(1e-4, 3e-4, size=()).astype(np.float32)
    tensors = {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": np.array(0.01, np.float32),
    }
    return tensors, numbers * (wide(scale) * factor).repeat(16, 1)


def modelopt_mixed(random, shape):
    """A layout that the shape decides: there are four kinds of projections."""
    if shape == (INTERMEDIATE, HIDDEN):
        return mxfp8(random, shape)
    if shape == (HIDDEN, INTERMEDIATE):
        return modelopt_nvfp4(random, shape)
    if shape[0] == KV_HEADS * HEAD_DIM:
        tensors, weight = fp8_channel(random, shape)
        return tensors | {"weight_scale": wide(tensors["weight_scale"][:, 0])}, weight
    tensors, weight = fp8_tensor(random, shape)
    return tensors | {"weight_scale": tensors["weight_scale"].reshape(())}, weight


def int8_channel(random, shape):
    codes = random.codes(shape, -128, 127).astype(np.int8)
    scale = random.scales((shape[0], 1), np.float32)
    return {"weight": codes, "weight_scale": scale}, wide(codes) * scale


def int8_group(random, shape, group=16):
    codes = random.codes(shape, -128, 127).astype(np.int8)
    scale = random.scales((shape[0], shape[1] // group), ml_dtypes.bfloat16)
    return {"weight": codes, "weight_scale": scale}, wide(codes) * wide(scale).repeat(group, 1)


def awq(random, shape, group=16):
    out, width = shape
    codes = random.codes((width, out), 0, 15)
    zeros = random.codes((width // group, out), 0, 15)
    scales = random.scales((width // group, out), np.float16)
    weight = (codes - zeros.repeat(group, 0)) * wide(scales).repeat(group, 0)
    return {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros), "scales": scales}, wide(weight.T)


def gptq(random, shape, group=32, is_v2=False, is_shuffled=False, bits=4):
    out, width = shape
    groups = -(-width // group)
    g_idx = np.arange(width) // group
    if is_shuffled:
        random.numbers.shuffle(g_idx)
    top = 2**bits - 1
    codes = random.codes((width, out), 0, top)
    # The older format stores the zero point less one, so it has no zero point of 0.
    zeros = random.codes((groups, out), 0 if is_v2 else 1, top)
    scales = random.scales((groups, out), np.float16)
    weight = (codes - zeros[g_idx]) * wide(scales)[g_idx]
    tensors = {
        "qweight": pack_straight(codes, 0, bits),
        "qzeros": pack_straight(zeros if is_v2 else zeros - 1, 1, bits),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }
    if not is_v2:
        tensors["bias"] = np.zeros(out, np.float16)
    return tensors, wide(weight.T)


def packed(random, shape, group, has_zeros, bits=4):
    out, width = shape
    groups = width // group
    half = 2 ** (bits - 1)
    codes = random.codes(shape, -half, half - 1)
    scales = random.scales((out, groups), ml_dtypes.bfloat16)
    tensors = {
        "weight_packed": pack_straight(codes + half, 1, bits),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    zeros = np.zeros((out, groups), np.int64)
    if has_zeros:
        zeros = random.codes((out, groups), -half, half - 1)
        tensors["weight_zero_point"] = pack_straight(zeros + half, 0, bits)
    return tensors, wide((codes - zeros.repeat(group, 1)) * wide(scales).repeat(group, 1))


def compressed(format, weights, ignore=("lm_head",), inputs=None):
    groups = {
        f"group_{i}": {"targets": ["Linear"], "weights": w, "input_activations": inputs, "output_activations": None}
        for i, w in enumerate(weights)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def args(bits, kind, strategy, group=None, symmetric=True):
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group,
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": None,
    }


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
OWN_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "damp_percent": 0.1, "lm_head": False}


def folders():
    """Yields name, float type of the rest, quantization_config, the function for a projection, and the dense
    projections."""
    bf16, f16 = ml_dtypes.bfloat16, np.float16
    yield ("fp8-tensor", bf16, compressed("float-quantized", [args(8, "float", "tensor")]), fp8_tensor, ())
    yield (
        "fp8-channel",
        bf16,
        compressed("float-quantized", [args(8, "float", "channel")], ["lm_head", "re:.*o_proj"], DYNAMIC),
        fp8_channel,
        ("self_attn.o_proj",),
    )
    block = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [24, 20],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
    }
    yield ("fp8-block", bf16, block, fp8_block, ("mlp.down_proj",))
    yield ("int8-channel", bf16, compressed("int-quantized", [args(8, "int", "channel")]), int8_channel, ())
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    yield ("awq", f16, config, awq, ())
    yield ("gptq", f16, GPTQ | {"group_size": 32, "desc_act": False}, gptq, ())

    def act_order(random, shape):
        return gptq(random, shape, group=16, is_v2=True, is_shuffled=True)

    config = GPTQ | {"group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"}
    yield ("gptq-act-order", f16, config, act_order, ())
    config = compressed("pack-quantized", [args(4, "int", "group", 16)])
    yield ("int4-symmetric", bf16, config, lambda random, shape: packed(random, shape, 16, False), ())

    for name, bits in (("int4-asymmetric", 4), ("int8-packed", 8)):

        def asymmetric(random, shape, bits=bits):
            return packed(random, shape, 40 if shape[1] % 40 == 0 else 16, True, bits)

        groups = [args(bits, "int", "group", each, False) for each in (16, 40)]
        yield (name, bf16, compressed("pack-quantized", groups), asymmetric, ())
    groups = [args(8, "int", "group", 16)]
    yield ("int8-group", bf16, compressed("int-quantized", groups), int8_group, ())

    def gptq_int8(random, shape):
        return gptq(random, shape, bits=8)

    down = ("mlp.down_proj",)
    weights = args(8, "float", "group", 32) | {"scale_dtype": "torch.uint8"}
    yield ("mxfp8", bf16, compressed("mxfp8-quantized", [weights], ["lm_head", "re:.*down_proj"]), mxfp8, down)
    weights = args(4, "float", "group", 32) | {"scale_dtype": "torch.uint8"}
    yield ("mxfp4", bf16, compressed("mxfp4-pack-quantized", [weights], ["lm_head", "re:.*down_proj"]), mxfp4, down)
    weights = args(4, "float", "tensor_group", 16) | {"scale_dtype": "torch.float8_e4m3fn"}
    inputs = args(4, "float", "tensor_group", 16) | {"dynamic": "local"}
    yield ("nvfp4", bf16, compressed("nvfp4-pack-quantized", [weights], inputs=inputs), nvfp4, ())
    yield ("modelopt-nvfp4", bf16, None, modelopt_nvfp4, ())
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }
    yield ("modelopt-mixed", bf16, mixed, modelopt_mixed, ())
    yield ("gptq-int8", f16, GPTQ | {"bits": 8, "group_size": 32, "desc_act": False}, gptq_int8, ())


def write(out):
    for name, floats, quantization, quantize, dense in folders():
        random = Random(name)
        tensors = {
            "model.embed_tokens.weight": random.weight((VOCAB, HIDDEN)).astype(floats),
            "lm_head.weight": random.weight((VOCAB, HIDDEN)).astype(floats),
        }
        norms = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
        for norm in norms:
            tensors[f"{norm}.weight"] = (1 + random.weight((HIDDEN,))).astype(floats)
        expected = {}
        for part, shape in PROJECTIONS.items():
            module = f"model.layers.0.{part}"
            if part in dense:
                weight = random.weight(shape).astype(floats)
                parts, expected[f"{module}.weight"] = {"weight": weight}, wide(weight)
            else:
                parts, expected[f"{module}.weight"] = quantize(random, shape)
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in parts.items()}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16" if floats is ml_dtypes.bfloat16 else "float16",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
        if quantization is not None:
            config["quantization_config"] = quantization
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        if quantization is None:
            (folder / "hf_quant_config.json").write_text(json.dumps(OWN_FILE, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_safetensors(folder / "model.safetensors", tensors)
        write_safetensors(folder / "expected.safetensors", expected)


def write_gpt_oss(out):
    """A gpt-oss of one layer whose experts are of four bits."""
    random = Random("mxfp4-gpt-oss")
    experts, chosen, width, heads, kv_heads, head_dim, vocab = 3, 2, 32, 2, 1, 32, 16
    hidden = 64
    bf16 = ml_dtypes.bfloat16
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.router.weight": (experts, hidden),
        f"{layer}.mlp.router.bias": (experts,),
        f"{layer}.mlp.experts.gate_up_proj_bias": (experts, 2 * width),
        f"{layer}.mlp.experts.down_proj_bias": (experts, hidden),
        f"{layer}.self_attn.sinks": (heads,),
    }
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"{layer}.self_attn.{part}_proj.weight"] = (count * head_dim, hidden)
        shapes[f"{layer}.self_attn.{part}_proj.bias"] = (count * head_dim,)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
    shapes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
    tensors = {name: random.weight(shape).astype(bf16) for name, shape in shapes.items()}
    expected = {}
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        scale, wide_scale = powers_of_two(random, (experts, rows, columns // 32), -7, -3)
        packed, numbers = float4(random, (experts * rows, columns))
        tensors[f"{layer}.mlp.experts.{name}_blocks"] = packed.reshape(experts, rows, columns // 32, 16)
        tensors[f"{layer}.mlp.experts.{name}_scales"] = scale
        weights = numbers.reshape(experts, rows, columns) * wide_scale.repeat(32, 2)
        expected[f"{layer}.mlp.experts.{name}"] = weights
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": True,
        "layer_types": ["sliding_attention"],
        "sliding_window": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "tie_word_embeddings": False,
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "experts_per_token": chosen,
        "swiglu_limit": 7.0,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    folder = out / "mxfp4-gpt-oss"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    write_safetensors(folder / "expected.safetensors", expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    out = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "quantized"
    if not parser.parse_args().check:
        write(out)
        write_gpt_oss(out)
        return
    with tempfile.TemporaryDirectory() as fresh:
        write(pathlib.Path(fresh))
        write_gpt_oss(pathlib.Path(fresh))
        files = [path.relative_to(fresh) for path in sorted(pathlib.Path(fresh).rglob("*")) if path.is_file()]
        differ = [str(file) for file in files if (out / file).read_bytes() != (pathlib.Path(fresh) / file).read_bytes()]
    if differ:
        sys.exit("differ: " + ", ".join(differ))


if __name__ == "__main__":
    main()
