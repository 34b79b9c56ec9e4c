"""The checkpoints that goldens.py makes: configurations, tokenizers, templates, and the texts they are tried on.

It writes nothing and knows no reference; the table in goldens.py states the purpose of each variant.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# === Texts ===

TEXT = """\
A server for language models does two kinds of work. First it reads the whole prompt at once, and that is limited by how
fast the machine can multiply. Then it writes the answer one token at a time, and that is limited by how fast the memory
can be read. The two kinds of work do not like each other: while a long prompt is being read, everyone who is waiting for
the next token has to wait longer.

So we keep them apart. Some workers read prompts, other workers write answers, and between them there is a transfer of
the keys and the values that the attention needs. Every block of memory has one owner, and every owner gives it back. If
a worker dies in the middle of an answer, another worker picks the answer up where it was left, and the reader does not
notice. That is the promise; the rest is bookkeeping, and the bookkeeping is what this text is about.

Consider a small town with a post office. Letters come in through the front door, are stamped by the first clerk, and are
carried across the yard to the second clerk, who sorts them. When there are more letters than the second clerk can sort,
the first clerk should stop stamping, or tell the people at the door to come back in an hour. What he should not do is to
throw the letters into the yard, however full it already is, and hope. A queue without a limit is a yard full of letters.

for (i = 0; i < n; i += 1) { total += price[i] * count[i]; }  // 3.14, 2024, 1,000,000
def owner(block): return leases.get(block.index, None)

It's what they'd call "fair": I'm sure you've seen it, we'll see; he isn't, she can't, they won't.
Größe, naïve, café, Ångström, señor. Привет, мир! こんにちは世界。你好,世界。مرحبا 🙂🚀
"""

TOKENIZER_TEXTS = [
    "",
    "a",
    "Hello, world!",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "tabs\tand\nnewlines\r\n\n\nand   runs    of spaces",
    "\n\n",
    "    indented = code(1, 22, 333, 4444, 55555)",
    "It's what they'd call DON'T, we'll see",
    "Größe naïve café Ångström",
    "cafe\u0301 with a combining accent",
    "Привет, мир!",
    "こんにちは世界。",
    "你好,世界。한국어도",
    "مرحبا بالعالم",
    "🙂🚀👩‍👩‍👧‍👦🇪🇺",
    "mixed 🙂 emoji and words🚀end",
    "zero\u200bwidth and \u00a0no-break",
    "control \x00\x01\x7f bytes",
    "▁already▁marked",
    "𝕌𝕟𝕚𝕔𝕠𝕕𝕖 beyond the plane",
    "https://example.com/a?b=c&d=%20#e",
    "x" * 40,
]

# === Tokenizers ===

SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_QWEN = SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(merges: int, split: str, normalizer, added: list[AddedToken], bos: str | None) -> Tokenizer:
    """Returns a byte-level BPE as Llama 3 and Qwen have it: bytes first, then merges, then the added tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=bos is not None))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(added)
    byte_level_post = processors.ByteLevel(trim_offsets=False)
    if bos is None:
        tokenizer.post_processor = byte_level_post
    else:
        bos_first = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_level_post, bos_first])
    return tokenizer


def sentencepiece_like(merges: int, metaspace: bool) -> Tokenizer:
    """Returns a BPE over characters with byte fallback, as converted from SentencePiece; spaces are written as U+2581.

    Llama 2 marks spaces in the normalizer; later conversions (metaspace) do it in the pre-tokenizer.
    """
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    latin = "".join(line for line in TEXT.splitlines(keepends=True) if line.isascii())
    draft.train_from_iterator([latin], trainers.BpeTrainer(vocab_size=merges + len(set(latin)), show_progress=False))
    learned = json.loads(draft.to_str())["model"]
    merges_learned = [tuple(merge) for merge in learned["merges"]]
    # The order of a converted SentencePiece model: specials, bytes, merged pieces, single characters.
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["".join(merge) for merge in merges_learned]
    pieces += sorted(piece for piece in set(learned["vocab"]) | {"é", "ö", "世"} if len(piece) == 1)
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges_learned, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def tokenizer_llama3() -> Tokenizer:
    added = special(
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"
    )
    return byte_level(128, SPLIT_LLAMA3, None, added, bos="<|begin_of_text|>")


def tokenizer_qwen(tools: bool) -> Tokenizer:
    added = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if tools:
        # These tokens are added but not special: they stay in the text when special tokens are skipped.
        added += [
            AddedToken(content, special=False, normalized=False)
            for content in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
        ]
    return byte_level(150, SPLIT_QWEN, normalizers.NFC(), added, bos=None)


# === Variants ===


def template(name: str) -> str:
    """Returns a chat template that was written for this test data in the manner of published ones."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")



@dataclass
class Variant:
    name: str
    config: dict
    dtype: str
    tokenizer: Tokenizer
    tokenizer_config: dict
    generation_config: dict
    template: str
    template_in_file: bool = False
    shards: int = 1
    chat_extra: list[dict] = field(default_factory=list)
    tokenizer_texts: list[str] = field(default_factory=list)
    leftover_inv_freq: bool = False
    # Factors of random weights, by a part of their names.
    factors: dict[str, float] = field(default_factory=dict)
    # Mean of norms' random weights; 0 where a class adds one.
    norm_center: float = 1.0
    # Endings of names of parameters of all experts whose shape is (experts, in, out).
    transposed: tuple[str, ...] = ()
    # Shapes of tensors that the file has and that a loader must ignore, by their names.
    leftovers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Length of the shortest prompt.
    prompt_min: int = 1
    # Beginnings of tensors' names, and those that the file has instead; the first that fits counts.
    renames: list[tuple[str, str]] = field(default_factory=list)

    @property
    def reads_images(self) -> bool:
        return "vision_config" in self.config

    @property
    def text_config(self) -> dict:
        return self.config.get("text_config", self.config)


def old(config: dict, dtype: str, rope_theta: float, rope_scaling: dict | None) -> dict:
    """Returns config.json in the spelling up to transformers 4."""
    return config | {
        "torch_dtype": dtype,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "transformers_version": "4.44.0",
    }


def new(config: dict, dtype: str, rope_parameters: dict) -> dict:
    """Returns config.json in the spelling since transformers 5."""
    return config | {"dtype": dtype, "rope_parameters": rope_parameters, "transformers_version": "5.0.0"}


def shape(hidden, layers, heads, kv_heads, intermediate, vocab, **more) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "attention_dropout": 0.0,
    } | more


LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather in a city <now> & later",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "e.g. Zürich"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}],
}


def llama2() -> Variant:
    config = shape(
        64, 2, 4, 4, 172, 512, architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=256,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False, pretraining_tp=1, bos_token_id=1,
        eos_token_id=2,
    )
    quoted = lambda content: {
        "__type": "AddedToken", "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
    }
    return Variant(
        "llama2",
        old(config, "float32", 10000.0, None),
        "float32",
        sentencepiece_like(150, metaspace=False),
        {
            "add_bos_token": True, "add_eos_token": False, "bos_token": quoted("<s>"), "eos_token": quoted("</s>"),
            "unk_token": quoted("<unk>"), "clean_up_tokenization_spaces": False, "model_max_length": 256,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.6, "top_p": 0.9, "do_sample": True},
        template("inst"),
        chat_extra=[{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}],
        tokenizer_texts=["<s>text between marks</s>", "a <unk> b"],
        leftover_inv_freq=True,
    )


def llama3_parts() -> tuple[Tokenizer, dict, list[dict], list[str]]:
    tokenizer = tokenizer_llama3()
    tokenizer_config = {
        "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": False,
        "model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Zürich?"}]
    answer = {"role": "tool", "content": "12 °C & rain"}
    chats = [
        {"messages": question, "tools": TOOLS},
        {"messages": question + [CALL, answer], "tools": TOOLS},
        {"messages": question + [CALL, {"role": "tool", "content": {"celsius": 12, "sky": "rain"}}]},
        {"messages": question[1:], "kwargs": {"with_date": True, "date_string": "26 Jul 2024"}},
        {"messages": question + [CALL | {"tool_calls": CALL["tool_calls"] * 2}]},
    ]
    texts = ["<|begin_of_text|>marked<|eot_id|>", "almost <|eot_id| > special", "1234567 12 3"]
    return tokenizer, tokenizer_config, chats, texts


def llama3() -> Variant:
    tokenizer, tokenizer_config, chats, texts = llama3_parts()
    ids = tokenizer.token_to_id
    eos = [ids("<|end_of_text|>"), ids("<|eom_id|>"), ids("<|eot_id|>")]
    config = shape(
        64, 3, 4, 2, 112, 392, architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
        bos_token_id=ids("<|begin_of_text|>"), eos_token_id=eos,
    )
    return Variant(
        "llama3",
        old(config, "bfloat16", 10000.0, LLAMA3_ROPE | {"rope_type": "llama3"}),
        "bfloat16", tokenizer, tokenizer_config,
        {"bos_token_id": ids("<|begin_of_text|>"), "eos_token_id": eos, "temperature": 0.6, "top_p": 0.9, "do_sample": True},
        template("header"), shards=3, chat_extra=chats, tokenizer_texts=texts,
    )


def llama3_new() -> Variant:
    tokenizer, tokenizer_config, chats, texts = llama3_parts()
    ids = tokenizer.token_to_id
    config = shape(
        96, 2, 6, 2, 104, 392, architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, mlp_bias=False, head_dim=16,
        bos_token_id=ids("<|begin_of_text|>"), eos_token_id=ids("<|eot_id|>"), pad_token_id=None,
    )
    return Variant(
        "llama3-new",
        new(config, "float16", LLAMA3_ROPE | {"factor": 32.0, "rope_theta": 50000.0, "rope_type": "llama3"}),
        "float16", tokenizer, tokenizer_config,
        {"bos_token_id": ids("<|begin_of_text|>"), "eos_token_id": [ids("<|end_of_text|>"), ids("<|eot_id|>")]},
        template("header"), template_in_file=True, chat_extra=chats, tokenizer_texts=texts,
    )


def mistral() -> Variant:
    config = shape(
        64, 3, 4, 2, 112, 512, architectures=["MistralForCausalLM"], model_type="mistral", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=24, head_dim=32, bos_token_id=1, eos_token_id=2,
    )
    return Variant(
        "mistral",
        old(config, "bfloat16", 1000000.0, None),
        "bfloat16",
        sentencepiece_like(150, metaspace=True),
        {
            "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False, "model_max_length": 512, "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {"bos_token_id": 1, "eos_token_id": 2},
        template("inst-blocks"),
        chat_extra=[
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]},
        ],
        tokenizer_texts=["<s>text between marks</s>", "two  spaces▁mark"],
    )


def olmo2() -> Variant:
    tokenizer = byte_level(120, SPLIT_LLAMA3, None, special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), bos=None)
    ids = tokenizer.token_to_id
    config = shape(
        64, 2, 4, 2, 104, 384, architectures=["Olmo2ForCausalLM"], model_type="olmo2", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=True, eos_token_id=ids("<|endoftext|>"),
        pad_token_id=ids("<|im_end|>"),
    )
    return Variant(
        "olmo2",
        old(config, "bfloat16", 500000.0, None),
        "bfloat16", tokenizer,
        {
            "add_bos_token": False, "bos_token": None, "eos_token": "<|endoftext|>", "unk_token": None,
            "clean_up_tokenization_spaces": False, "model_max_length": 512, "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {"eos_token_id": [ids("<|im_end|>"), ids("<|endoftext|>")]},
        template("chatml"),
        tokenizer_texts=["<|im_start|>user\nhi<|im_end|>\n", "1234567 12 3"],
        # Norms bound scores and outputs: with even attention and a small embedding greedy paths would be loops.
        factors={"q_norm": 3.0, "embed_tokens": 2.0},
    )


def plain(name: str, config: dict, **more) -> Variant:
    """Returns a variant of a family whose tokenizer and template are nothing special."""
    tokenizer = byte_level(100, SPLIT_LLAMA3, None, special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), bos=None)
    ids = tokenizer.token_to_id
    text = config.get("text_config", config)
    text |= {"bos_token_id": ids("<|endoftext|>"), "eos_token_id": ids("<|im_end|>"), "pad_token_id": ids("<|endoftext|>")}
    return Variant(
        name, config, config.get("dtype") or config["torch_dtype"], tokenizer,
        {
            "add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "unk_token": None,
            "clean_up_tokenization_spaces": False, "model_max_length": 512, "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {"eos_token_id": [ids("<|im_end|>"), ids("<|endoftext|>")]},
        template("chatml"),
        **more,
    )


def smollm3() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[1, 0, 1, 0], use_sliding_window=False, sliding_window=None, max_window_layers=28,
        layer_types=["full_attention"] * 4, pretraining_tp=2,
    )
    return plain("smollm3", old(config, "bfloat16", 5000000.0, None))


def seed_oss() -> Variant:
    config = shape(
        48, 2, 4, 2, 88, 363, architectures=["SeedOssForCausalLM"], model_type="seed_oss", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=True, attention_out_bias=False, mlp_bias=False,
        head_dim=32, residual_dropout=0.1, pretraining_tp=1,
    )
    return plain("seed-oss", new(config, "bfloat16", {"rope_type": "default", "rope_theta": 10000000.0}))


def granite() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["GraniteForCausalLM"], model_type="granite", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=False, mlp_bias=False, embedding_multiplier=0.7,
        logits_scaling=0.7, residual_multiplier=0.6, attention_multiplier=0.4,
    )
    return plain("granite", old(config, "bfloat16", 10000.0, None))


def ministral3() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["Ministral3ForCausalLM"], model_type="ministral3",
        max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, head_dim=32, sliding_window=None,
    )
    rope = {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 32,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4,
    }
    return plain("ministral3", new(config, "bfloat16", rope))


def olmo3() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["Olmo3ForCausalLM"], model_type="olmo3", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    rope = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }
    return plain("olmo3", old(config, "bfloat16", 500000.0, rope), factors={"q_norm": 3.0, "embed_tokens": 2.0})


def exaone4() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["Exaone4ForCausalLM"], model_type="exaone4", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, head_dim=32, sliding_window=24, sliding_window_pattern="LLLG",
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    rope = {"rope_type": "llama3", **LLAMA3_ROPE, "factor": 16.0}
    return plain("exaone4", old(config, "bfloat16", 1000000.0, rope), factors={"q_norm": 2.0, "embed_tokens": 2.0})


def phi3() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["Phi3ForCausalLM"], model_type="phi3", max_position_embeddings=512,
        original_max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False,
        sliding_window=24, embd_pdrop=0.0, resid_pdrop=0.0,
    )
    return plain("phi3", old(config, "bfloat16", 10000.0, None))


def phi4_mini() -> Variant:
    config = shape(
        48, 3, 3, 1, 88, 363, architectures=["Phi3ForCausalLM"], model_type="phi3", max_position_embeddings=512,
        original_max_position_embeddings=2, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=False,
        sliding_window=None, embd_pdrop=0.0, resid_pdrop=0.0, partial_rotary_factor=0.75, full_attn_mod=1,
        interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
    )
    rope = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 1.7, 2.5, 4.0, 7.5]}
    # transformers takes the short factors for a sequence that is no longer than the original context, and ours, which
    # may become longer, never does.
    return plain("phi4-mini", old(config, "bfloat16", 10000.0, rope), prompt_min=3, factors={"qkv_proj": 0.5})


def phi4_mini_short() -> Variant:
    config = shape(
        48, 3, 3, 1, 88, 363, architectures=["Phi3ForCausalLM"], model_type="phi3", max_position_embeddings=512,
        original_max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=False,
        sliding_window=None, embd_pdrop=0.0, resid_pdrop=0.0, partial_rotary_factor=0.75, full_attn_mod=1,
        interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
    )
    rope = {"type": "longrope", "short_factor": [1.0, 1.1, 1.4, 2.0, 3.0, 5.0], "long_factor": [9.0] * 6}
    return plain("phi4-mini-short", old(config, "bfloat16", 10000.0, rope), factors={"qkv_proj": 0.5})


def glm4() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["Glm4ForCausalLM"], model_type="glm4", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=True, head_dim=24, partial_rotary_factor=0.5,
    )
    return plain("glm4", old(config, "bfloat16", 10000.0, None), factors={"embed_tokens": 2.0})


def gemma3() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", max_position_embeddings=512,
        rms_norm_eps=1e-6, attention_bias=False, head_dim=32, sliding_window=24, sliding_window_pattern=3,
        query_pre_attn_scalar=12, hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=10000.0,
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False,
    )
    del config["hidden_act"]
    rope = {"rope_type": "linear", "factor": 8.0}
    # A tied head would repeat the last token: the embedding is the larger part of the residual stream.
    return plain("gemma3", old(config, "bfloat16", 1000000.0, rope), norm_center=0.0, factors={"embed_tokens": 0.4})


def gemma2() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["Gemma2ForCausalLM"], model_type="gemma2", max_position_embeddings=512,
        rms_norm_eps=1e-2, attention_bias=False, head_dim=32, sliding_window=24, query_pre_attn_scalar=12,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        cache_implementation="hybrid",
    )
    # Both caps are small and the epsilon is large, so that all of them show.
    return plain("gemma2", old(config, "bfloat16", 10000.0, None), norm_center=0.0, factors={"embed_tokens": 0.15})


def cohere() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["CohereForCausalLM"], model_type="cohere", max_position_embeddings=512,
        layer_norm_eps=1e-2, attention_bias=False, logit_scale=0.7, use_qk_norm=False,
    )
    return plain("cohere", old(config, "bfloat16", 4000000.0, None), factors={"embed_tokens": 0.4})


def cohere2() -> Variant:
    config = shape(
        48, 4, 4, 2, 88, 363, architectures=["Cohere2ForCausalLM"], model_type="cohere2", max_position_embeddings=512,
        layer_norm_eps=1e-2, attention_bias=False, logit_scale=0.7, sliding_window=24, sliding_window_pattern=2,
        layer_switch=2, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        rotary_pct=1.0, use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=False, use_qk_norm=False, cache_implementation="hybrid",
    )
    # A tied head would repeat the last token: the embedding is the larger part of the residual stream. The epsilon is
    # large, so that it shows.
    return plain("cohere2", old(config, "bfloat16", 50000.0, None), factors={"embed_tokens": 0.4})


def granite4() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=False,
        embedding_multiplier=0.7, logits_scaling=0.7, residual_multiplier=0.6, attention_multiplier=0.4,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=72, position_embedding_type="rope",
        layer_types=["attention"] * 3, mamba_n_heads=4, mamba_d_head=24, mamba_expand=2, mamba_d_state=16,
        router_aux_loss_coef=0.01, output_router_logits=False, normalization_function="rmsnorm", init_method="mup",
    )
    return plain("granite4", old(config, "bfloat16", 10000.0, None))


def qwen(name: str, config: dict, tools: bool, chats: list[dict], **more) -> Variant:
    tokenizer = tokenizer_qwen(tools)
    ids = tokenizer.token_to_id
    config |= {"bos_token_id": ids("<|endoftext|>"), "eos_token_id": ids("<|im_end|>")}
    return Variant(
        name, config, config.get("dtype") or config["torch_dtype"], tokenizer,
        {
            "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>", "unk_token": None, "clean_up_tokenization_spaces": False, "errors": "replace",
            "model_max_length": 512, "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {
            "bos_token_id": ids("<|endoftext|>"), "pad_token_id": ids("<|endoftext|>"), "do_sample": True,
            "eos_token_id": [ids("<|im_end|>"), ids("<|endoftext|>")], "repetition_penalty": 1.05, "temperature": 0.7,
            "top_p": 0.8, "top_k": 20,
        },
        template("chatml-tools") if tools else template("chatml"),
        chat_extra=chats,
        tokenizer_texts=["<|im_start|>user\nhi<|im_end|>\n", "<think>\nhm\n</think>\n\nyes", "12345"],
        **more,
    )


def qwen2() -> Variant:
    config = shape(
        64, 2, 4, 2, 108, 416, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=16, use_sliding_window=False, max_window_layers=1,
    )
    return qwen("qwen2", old(config, "bfloat16", 1000000.0, None), False, [])


def qwen25() -> Variant:
    config = shape(
        64, 2, 2, 2, 120, 448, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, sliding_window=512, use_sliding_window=False, max_window_layers=2,
    )
    config = old(config, "float32", 10000.0, None)
    del config["rope_scaling"]
    return qwen("qwen2.5", config, True, [], shards=2)


def qwen3() -> Variant:
    config = shape(
        64, 3, 4, 2, 100, 416, architectures=["Qwen3ForCausalLM"], model_type="qwen3", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, head_dim=32, sliding_window=None,
        use_sliding_window=False, max_window_layers=3, layer_types=["full_attention"] * 3,
    )
    question = {"role": "user", "content": "Weather in Zürich?"}
    answers = [{"role": "tool", "content": "12 °C & rain"}, {"role": "tool", "content": "wind"}]
    thought = {"role": "assistant", "content": "<think>\nHe asks.\n</think>\n\nIt rains."}
    chats = [
        {"messages": [question], "tools": TOOLS},
        {"messages": [question], "kwargs": {"enable_thinking": False}},
        {"messages": [question, CALL | {"content": ""}] + answers, "tools": TOOLS},
        {"messages": [question, thought, {"role": "user", "content": "And then?"}]},
        {"messages": [question, thought]},
        {"messages": [question, {"role": "assistant", "content": "Rain.", "reasoning_content": "\nHm.\n"}]},
    ]
    config = new(config, "bfloat16", {"rope_type": "default", "rope_theta": 1000000.0})
    return qwen("qwen3", config, True, chats, template_in_file=True)


def mistral_small3() -> Variant:
    text = shape(
        48, 2, 4, 2, 88, 363, model_type="mistral", max_position_embeddings=512, rms_norm_eps=1e-5, head_dim=32,
        sliding_window=None, rope_theta=1000000000.0,
    )
    images = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "image_size": 28, "patch_size": 14, "model_type": "pixtral",
    }
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text,
        "vision_config": images, "image_token_index": 10, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "transformers_version": "4.50.0",
    }
    renames = [
        ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."), ("model.multi_modal_projector.", "multi_modal_projector."),
    ]
    return plain("mistral-small3", config, renames=renames)


def gemma3_images() -> Variant:
    text = {
        "hidden_size": 48, "intermediate_size": 88, "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 363, "sliding_window": 24,
        "max_position_embeddings": 512, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    }
    images = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": images, "boi_token_index": 360, "eoi_token_index": 361, "image_token_index": 362,
        "mm_tokens_per_image": 4, "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
    }
    # The head is the embedding, which is made small, so that the layers decide the next token.
    return plain("gemma3-images", config, norm_center=0.0, factors={"embed_tokens": 0.15})


def qwen3_moe() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, head_dim=32, sliding_window=None,
        use_sliding_window=False, max_window_layers=3, decoder_sparse_step=1, mlp_only_layers=[0], num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True, output_router_logits=False,
        router_aux_loss_coef=0.001,
    )
    return plain("qwen3-moe", old(config, "bfloat16", 1000000.0, None))


def mixtral() -> Variant:
    config = shape(
        40, 2, 4, 2, 56, 363, architectures=["MixtralForCausalLM"], model_type="mixtral", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=True, sliding_window=None, num_local_experts=6, num_experts_per_tok=2,
        output_router_logits=False, router_aux_loss_coef=0.02,
    )
    config = old(config, "float32", 1000000.0, None)
    del config["rope_scaling"]
    return plain("mixtral", config, factors={"embed_tokens": 0.4})


def olmoe() -> Variant:
    config = shape(
        48, 2, 4, 2, 40, 363, architectures=["OlmoeForCausalLM"], model_type="olmoe", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False, clip_qkv=None, norm_topk_prob=False,
        num_experts=8, num_experts_per_tok=3, output_router_logits=False, router_aux_loss_coef=0.01,
    )
    return plain("olmoe", old(config, "bfloat16", 10000.0, None))


def qwen2_moe() -> Variant:
    config = shape(
        48, 4, 4, 2, 72, 363, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=16, use_sliding_window=False, max_window_layers=2,
        decoder_sparse_step=2, norm_topk_prob=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, output_router_logits=False, router_aux_loss_coef=0.001,
    )
    return plain("qwen2-moe", old(config, "bfloat16", 1000000.0, None), factors={"embed_tokens": 0.4})


def granite_moe(name: str, layers: int, **more) -> Variant:
    config = shape(
        48, layers, 4, 2, 40, 363, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
        attention_bias=False, embedding_multiplier=0.7, logits_scaling=0.7, residual_multiplier=0.6,
        attention_multiplier=0.4, num_local_experts=6, num_experts_per_tok=3, output_router_logits=False,
        router_aux_loss_coef=0.0,
    )
    return plain(name, old(config | more, "bfloat16", 10000.0, None))


def granitemoe() -> Variant:
    return granite_moe("granitemoe", 3, architectures=["GraniteMoeForCausalLM"], model_type="granitemoe")


def granitemoeshared() -> Variant:
    return granite_moe(
        "granitemoeshared", 2, architectures=["GraniteMoeSharedForCausalLM"], model_type="granitemoeshared",
        shared_intermediate_size=56,
    )


def granite4_moe() -> Variant:
    return granite_moe(
        "granite4-moe", 2, architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        shared_intermediate_size=56, position_embedding_type="nope", layer_types=["attention"] * 2, mamba_n_heads=4,
        mamba_d_head=24, mamba_expand=2, mamba_d_state=16, normalization_function="rmsnorm", init_method="mup",
        tie_word_embeddings=False,
    )


def glm4_moe() -> Variant:
    config = shape(
        48, 3, 4, 2, 88, 363, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=True, head_dim=24, partial_rotary_factor=0.5,
        moe_intermediate_size=24, num_experts_per_tok=4, n_shared_experts=2, n_routed_experts=9, n_group=3, topk_group=2,
        routed_scaling_factor=1.7, first_k_dense_replace=1, norm_topk_prob=True, use_qk_norm=True,
        num_nextn_predict_layers=1,
    )
    # The layer that predicts a further token, in a file of a few of its tensors.
    mtp = "model.layers.3."
    leftovers = {
        f"{mtp}eh_proj.weight": (48, 96), f"{mtp}enorm.weight": (48,), f"{mtp}hnorm.weight": (48,),
        f"{mtp}mlp.gate.e_score_correction_bias": (9,), f"{mtp}shared_head.norm.weight": (48,),
        f"{mtp}self_attn.q_norm.weight": (24,),
    }
    return plain("glm4-moe", old(config, "bfloat16", 1000000.0, None), leftovers=leftovers)


def minimax_m2() -> Variant:
    config = shape(
        48, 2, 4, 2, 40, 363, architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2",
        max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False, head_dim=32, rotary_dim=12,
        num_local_experts=8, num_experts_per_tok=3, output_router_logits=False, router_aux_loss_coef=0.001,
        router_jitter_noise=0.0, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer",
        use_routing_bias=True, shared_intermediate_size=0, use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1,
        attn_type_list=[1, 1],
    )
    return plain("minimax-m2", old(config, "bfloat16", 5000000.0, None))


def gpt_oss() -> Variant:
    config = shape(
        40, 3, 4, 2, 56, 363, architectures=["GptOssForCausalLM"], model_type="gpt_oss", max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=True, head_dim=32, sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_local_experts=6,
        num_experts_per_tok=2, experts_per_token=2, swiglu_limit=1.5, output_router_logits=False,
        router_aux_loss_coef=0.9, initial_context_length=64,
    )
    rope = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False,
    }
    # The limit is so small that the clamps of gate and up show.
    transposed = ("gate_up_proj", "down_proj")
    return plain("gpt-oss", old(config, "bfloat16", 150000.0, rope), transposed=transposed)


VARIANTS = {
    "llama2": llama2, "llama3": llama3, "llama3-new": llama3_new, "mistral": mistral, "olmo2": olmo2, "qwen2": qwen2,
    "qwen2.5": qwen25, "qwen3": qwen3, "smollm3": smollm3, "seed-oss": seed_oss, "granite": granite,
    "ministral3": ministral3, "olmo3": olmo3, "exaone4": exaone4, "phi3": phi3, "phi4-mini": phi4_mini,
    "phi4-mini-short": phi4_mini_short, "glm4": glm4, "gemma2": gemma2, "gemma3": gemma3, "cohere": cohere,
    "cohere2": cohere2, "granite4": granite4, "mistral-small3": mistral_small3, "gemma3-images": gemma3_images,
    "qwen3-moe": qwen3_moe, "mixtral": mixtral, "olmoe": olmoe, "qwen2-moe": qwen2_moe, "granitemoe": granitemoe,
    "granitemoeshared": granitemoeshared, "granite4-moe": granite4_moe, "glm4-moe": glm4_moe, "minimax-m2": minimax_m2,
    "gpt-oss": gpt_oss,
}
