"""Bytes that a decode step must move, and operations that a prompt must take, computed from a model's sizes.

usage: model.py FOLDER NAME [--weight-bits N]     (writes a `model` record of its config.json)

Every system is compared with these figures, whatever it really moves: a system that reads more than it must is slower,
and does not count as better used. Standard library only.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import record


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    element_bytes: int = 2
    # The bits of an element of the layers' matrices, with its share of scales and zero points; the head is not
    # quantised.
    weight_bits: float = 16
    # Experts of a layer, and those of each token; a dense model has one. `intermediate` is the width of each.
    experts: int = 1
    chosen: int = 1

    @staticmethod
    def of(folder: str | Path, name: str | None = None) -> "Model":
        """Returns the sizes in a folder's config.json."""
        config = json.loads((Path(folder) / "config.json").read_text())
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
        return Model(
            name=name or Path(folder).name,
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings")),
            experts=experts,
            chosen=config["num_experts_per_tok"] if experts > 1 else 1,
        )

    @property
    def attention_elements(self) -> int:
        """The elements of one layer's matrices q, k, v and o, and of its router."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        return attention + (self.hidden * self.experts if self.experts > 1 else 0)

    @property
    def expert_elements(self) -> int:
        """The elements of one expert's, or of the MLP's, matrices gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_elements(self) -> int:
        """The elements of one layer's matrices that a token meets."""
        return self.attention_elements + self.chosen * self.expert_elements

    @property
    def head_elements(self) -> int:
        return self.hidden * self.vocabulary

    def weight_bytes(self, rows: int | None) -> int:
        """The bytes of weights that a step of so many rows must read, or of all: every matrix once, with the head, and
        experts that rows chose, if every choice is as likely. The embedding table, of which a step reads a row per
        sequence, is left out, and so are norms, a ten-thousandth."""
        missed = 0.0 if rows is None else (1 - self.chosen / self.experts) ** rows
        elements = self.attention_elements + self.experts * (1 - missed) * self.expert_elements
        return int(self.layers * elements * self.weight_bits / 8) + self.head_elements * self.element_bytes

    @property
    def stored_bytes(self) -> int:
        """The bytes of a checkpoint, without norms."""
        return self.weight_bytes(None) + (0 if self.is_tied else self.head_elements * self.element_bytes)

    @property
    def kv_token_bytes(self) -> int:
        """The bytes of keys and values of one position in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    def step_bytes(self, batch: int, context: int) -> int:
        """The bytes that a decode step must read: weights once, and each sequence's keys and values once:

        weight_bytes(batch) + batch × context × kv_token_bytes
        """
        return self.weight_bytes(batch) + batch * context * self.kv_token_bytes

    def prompt_operations(self, tokens: int) -> int:
        """Operations of the matrix products of one prompt: two for each element of each layer's matrices and each
        token, and the head for the last token alone:

        2 × (tokens × layers × layer_elements + head_elements)
        """
        return 2 * (tokens * self.layers * self.layer_elements + self.head_elements)

    def attention_operations(self, tokens: int) -> int:
        """Operations of causal attention over one prompt: token p has p + 1 keys; two operations for each of a
        key's elements, and two for each of a value's, of each query head:

        4 × layers × query_heads × head_dim × tokens × (tokens + 1) / 2
        """
        pairs = tokens * (tokens + 1) // 2
        return 4 * self.layers * self.query_heads * self.head_dim * pairs


def bandwidth_use(model: Model, batch: int, context: int, seconds: float, copy: float) -> float:
    """MBU of a decode step: bytes that it must read, over its time, over measured copy bandwidth (bytes read plus
    bytes written, per second)."""
    return model.step_bytes(batch, context) / seconds / copy


def compute_use(model: Model, tokens: int, seconds: float, rate: float) -> float:
    """MFU of a prompt: operations of its matrix products, over its time, over the measured rate of large bf16
    matrix products. Attention's own are time lost here."""
    return model.prompt_operations(tokens) / seconds / rate


def compute_use_with_attention(model: Model, tokens: int, seconds: float, rate: float) -> float:
    """The same with the operations of attention counted too, which dominate long prompts."""
    operations = model.prompt_operations(tokens) + model.attention_operations(tokens)
    return operations / seconds / rate


if __name__ == "__main__":
    found = Model.of(sys.argv[1], sys.argv[2])
    if "--weight-bits" in sys.argv:
        found = replace(found, weight_bits=float(sys.argv[sys.argv.index("--weight-bits") + 1]))
    record.put("model", **asdict(found))
