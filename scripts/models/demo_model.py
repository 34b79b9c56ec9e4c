"""The demo's Llama, whose parameters are named as transformers names them; growing it, and rounding it to four bits.

train_demo.py trains it, demo_export.py writes it as a Hugging Face folder.
"""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from demo_corpus import VOCAB

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
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
# Widths of `demo` are multiples of 128, and each slice of its output projection (64) is whole groups of four bits.
SHAPES = {
    "small": COMMON | {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6},
    "demo": COMMON | {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 10},
}
BITS, GROUP = 4, 64


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
        if x.is_cuda:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # On a CPU attention is written out: with heads this small, scaled_dot_product_attention takes twice the
            # time of a step.
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
        self.config = c
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
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = (table[: ids.shape[1]].to(dtype) for table in (self.cos, self.sin))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def projections(self):
        """Returns (name, parameter) of the matrices that four bits replace."""
        return [(n, p) for n, p in self.named_parameters() if p.dim() == 2 and "embed" not in n]


# === Growing ===

OUTPUTS = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def grow(model: Llama, folder: Path) -> None:
    """Puts a smaller checkpoint's weights into the model, so that training goes on from about its loss.

    Old layers are spread over the new depth. Layers between them copy the layer before but for their outputs, which
    are zero. Of each matrix the old part is in the upper left corner; new columns of the residual are read with small
    weights, so that they differ and learn, and new neurons write zeros.
    """
    old_config = json.loads((folder / "config.json").read_text())
    old = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    depth, old_depth = model.config["num_hidden_layers"], old_config["num_hidden_layers"]
    wide, narrow = model.config["hidden_size"], old_config["hidden_size"]
    at = [round(i * (depth - 1) / (old_depth - 1)) for i in range(old_depth)]
    for name, parameter in model.named_parameters():
        source, copied = name, False
        if ".layers." in name:
            layer = int(name.split(".")[2])
            before = max(i for i in range(old_depth) if at[i] <= layer)
            copied = at[before] != layer
            source = name.replace(f".layers.{layer}.", f".layers.{before}.")
        value = old[source]
        if parameter.dim() == 1:
            # The new part of the residual is small, so the mean of squares falls by the ratio of the widths.
            parameter[:narrow] = value * math.sqrt(narrow / wide)
            parameter[narrow:] = value.mean() * math.sqrt(narrow / wide)
            continue
        rows, columns = value.shape
        if name.endswith("down_proj.weight"):
            parameter[:, columns:] = 0.0
        elif "embed" in name:
            parameter[:, columns:] = torch.randn_like(parameter[:, columns:]) * value.std() * 0.2
        elif not name.endswith("o_proj.weight"):
            parameter[:, columns:] *= 0.3
            parameter[rows:] *= math.sqrt(columns / parameter.shape[1])
        parameter[:rows, :columns] = value
        if copied and name.endswith(OUTPUTS):
            parameter.zero_()


# === Four bits ===


def groups_of(weight: torch.Tensor):
    """Returns integers from -8 to 7 (rows, groups, GROUP) and their scales (rows, groups, 1), which bf16 holds."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(dim=2, keepdim=True) / (2**BITS - 1) * 2
    scales = scales.clamp(min=1e-8).bfloat16().float()
    return (groups / scales).round().clamp(-(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1), scales


@contextmanager
def rounded(model: Llama):
    """Replaces the projections' weights by their four-bit values, and gives the exact ones back at the end.

    Gradients that are made inside stay, so the exact weights learn what reduces the loss of the rounded ones.
    """
    projections = model.projections()
    exact = [parameter.detach().clone() for _, parameter in projections]
    with torch.no_grad():
        for _, parameter in projections:
            integers, scales = groups_of(parameter)
            parameter.copy_((integers * scales).flatten(1))
    try:
        yield
    finally:
        with torch.no_grad():
            for (_, parameter), value in zip(projections, exact):
                parameter.copy_(value)
