"""A peer: a plain fast decoder in PyTorch, with torch.compile, a CUDA graph for a step and a contiguous cache.

usage: torch_loop.py --model FOLDER [--device cuda|cpu]      (answers turns.py)

It runs the Llama architecture, without batching over time, paging, scheduling, or sampling other than the largest
logit. The time is that of the device replaying its step, as fast as steps can follow each other. A server cannot reach
that, so it is a hard peer. The prompt runs in one piece.
"""

import argparse
import json
import time
from pathlib import Path

import answers
import torch
import torch.nn.functional as F
from safetensors.torch import safe_open
from torch.nn.attention.flex_attention import flex_attention

# Positions of a cache beyond its context, for the steps that are run.
STEPS, STEPS_UNTIMED = 32, 8


class Sizes:
    def __init__(self, config: dict) -> None:
        self.layers = config["num_hidden_layers"]
        self.query_heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.query_heads
        self.epsilon = config["rms_norm_eps"]
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.context = config["max_position_embeddings"]
        self.query_width = self.query_heads * self.head_dim
        self.kv_width = self.kv_heads * self.head_dim


def load(folder: Path, sizes: Sizes, device: str) -> dict:
    """Loads weights onto the device; matrices that share an input become one."""
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=device) as file:
            stored |= {name: file.get_tensor(name).to(torch.bfloat16) for name in file.keys()}
    take = stored.pop
    weights = {"embedding": take("model.embed_tokens.weight"), "norm": take("model.norm.weight"), "layers": []}
    weights["head"] = take("lm_head.weight") if "lm_head.weight" in stored else weights["embedding"]
    for index in range(sizes.layers):
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        weights["layers"].append((
            take(at + "input_layernorm.weight"),
            torch.cat([take(f"{attention}{part}_proj.weight") for part in "qkv"]),
            take(attention + "o_proj.weight"),
            take(at + "post_attention_layernorm.weight"),
            torch.cat([take(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]),
            take(mlp + "down_proj.weight"),
        ))
    return weights


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: (batch, heads, tokens, dim); cos, sin: (tokens, dim / 2)."""
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Loop:
    def __init__(self, folder: Path, device: str) -> None:
        self.sizes = Sizes(json.loads((folder / "config.json").read_text()))
        self.device = device
        self.weights = load(folder, self.sizes, device)
        half = self.sizes.head_dim // 2
        frequencies = self.sizes.theta ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(min(self.sizes.context, 65536), device=device, dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()
        # One graph serves all layers of a shape: weights and caches are arguments.
        self.layer_of_step = torch.compile(self.step_layer, dynamic=False)
        self.layer_of_prompt = torch.compile(self.prompt_layer, dynamic=False)
        torch._dynamo.config.cache_size_limit = 64

    def heads(self, x: torch.Tensor, norm: torch.Tensor, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        sizes, (batch, tokens, _) = self.sizes, x.shape
        q, k, v = F.linear(normed(x, norm, sizes.epsilon), qkv).split([sizes.query_width, sizes.kv_width, sizes.kv_width], -1)
        q, k, v = (part.view(batch, tokens, -1, sizes.head_dim).transpose(1, 2) for part in (q, k, v))
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def rest(self, x: torch.Tensor, attended: torch.Tensor, layer: tuple) -> torch.Tensor:
        _, _, out, norm, gate_up, down = layer
        x = x + F.linear(attended.transpose(1, 2).reshape(*x.shape[:2], -1), out)
        gate, up = F.linear(normed(x, norm, self.sizes.epsilon), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    def step_layer(
        self, x: torch.Tensor, layer: tuple, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """x: (batch, 1, hidden); keys, values: (batch, kv_heads, tokens, dim); position: (1,)."""
        q, k, v = self.heads(x, layer[0], layer[1], self.cos[position], self.sin[position])
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        if self.device == "cpu":
            seen = torch.arange(keys.shape[2], device=x.device)[None, None, None, :] <= position
            return self.rest(x, F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True), layer)

        def seen(score, _batch, _head, _query, key):
            return torch.where(key <= position[0], score, -float("inf"))

        return self.rest(x, flex_attention(q, keys, values, score_mod=seen, enable_gqa=True), layer)

    def prompt_layer(self, x: torch.Tensor, layer: tuple) -> torch.Tensor:
        """x: (1, tokens, hidden)."""
        tokens = x.shape[1]
        q, k, v = self.heads(x, layer[0], layer[1], self.cos[:tokens], self.sin[:tokens])
        return self.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), layer)

    def next_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, hidden)."""
        return F.linear(normed(x, self.weights["norm"], self.sizes.epsilon), self.weights["head"]).argmax(-1)

    def settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def prefill(self, tokens: int) -> list[float]:
        prompt = torch.randint(0, self.weights["embedding"].shape[0], (1, tokens), device=self.device)
        seconds = []
        for turn in range(5):
            self.settle()
            begin = time.perf_counter()
            x = F.embedding(prompt, self.weights["embedding"])
            for layer in self.weights["layers"]:
                x = self.layer_of_prompt(x, layer)
            self.next_tokens(x[:, -1]).cpu()
            if turn >= 2:
                seconds.append(time.perf_counter() - begin)
        return seconds

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> list[float]:
        sizes, length = self.sizes, context + STEPS + 2 * STEPS_UNTIMED
        shape = (batch, sizes.kv_heads, length, sizes.head_dim)
        caches = [tuple(torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in "kv") for _ in range(sizes.layers)]
        tokens = torch.randint(0, self.weights["embedding"].shape[0], (batch,), device=self.device)
        position = torch.tensor([context], device=self.device)

        def step() -> None:
            x = F.embedding(tokens[:, None], self.weights["embedding"])
            for layer, (keys, values) in zip(self.weights["layers"], caches):
                x = self.layer_of_step(x, layer, keys, values, position)
            tokens.copy_(self.next_tokens(x[:, 0]))
            position.add_(1)

        run = self.captured(step)
        for _ in range(STEPS_UNTIMED):
            run()
        seconds = []
        for _ in range(4):
            self.settle()
            begin = time.perf_counter()
            for _ in range(STEPS // 4):
                run()
            self.settle()
            seconds.append((time.perf_counter() - begin) / (STEPS // 4))
        del caches, run
        if self.device != "cpu":
            torch.cuda.empty_cache()
        return seconds

    def captured(self, step):
        """Captures the step as one graph, after a few runs to compile it."""
        if self.device == "cpu":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    begin = time.perf_counter()
    loop = Loop(args.model, args.device)
    loop.settle()
    answers.serve(time.perf_counter() - begin, loop.prefill, loop.decode)


if __name__ == "__main__":
    main()
