#!/usr/bin/env python3
"""Writes the reference goldens under testdata/: tiny checkpoints, and what a reference makes of them.

For each architecture Cleave loads there is a folder in the Hugging Face layout with seeded random weights of a few
hundred kilobytes, and a `goldens.json` with what `transformers` answers in float32 (eager attention, the whole
sequence recomputed for every token, no KV cache). The variants differ on purpose in what real checkpoints differ in:

    name        attention, weights          written as
    llama2      MHA, untied, f32            old spelling (rope_theta, torch_dtype), leftover rotary_emb.inv_freq tensors
    llama3      GQA, tied, bf16, 3 shards   old spelling, llama3 rope scaling, eos list, template in tokenizer_config.json
    llama3-new  GQA, untied, f16            new spelling (rope_parameters, dtype), chat_template.jinja
    mistral     GQA, untied, bf16           sliding window of 24, head_dim 32 beside hidden / heads = 16
    qwen2       GQA, tied, bf16             q/k/v biases, a sliding_window that use_sliding_window switches off
    qwen2.5     MHA, untied, f32, 2 shards  q/k/v biases, vocabulary padded beyond the tokenizer's
    qwen3       GQA, tied, bf16             q/k norms, explicit head_dim, new spelling, template with thinking

No norm is one and no bias is zero, so that a forgotten one shows. Rows of the vocabulary beyond the tokenizer are
random too, so a greedy path may visit ids that decode to nothing.

goldens.json:
    reference   versions of torch, transformers and tokenizers that made the file
    prompts     20 of {prompt_tokens, text?, tokens, margin_min, first_top_logits, last_top_logits}
                tokens: 32 greedy tokens, end-of-sequence ignored. first_top_logits: [[id, logit] x 20], descending, at
                the last prompt position (its first id is tokens[0]); last_top_logits: the same where tokens[31] was
                chosen. margin_min: the smallest top-1 to top-2 distance of the path; prompts below 2e-3 are redrawn,
                so a logit tolerance of 1e-3 cannot flip a token. text, where present, encodes to prompt_tokens.
    tokenizer   encode: {text, ids, ids_with_special, decoded}   (ids: no special token is added; decoded: from ids,
                special tokens kept); decode: {ids, text, text_without_special}
    chat        {messages, tools?, kwargs?, add_generation_prompt, rendered, ids} or {..., error}; kwargs are further
                template variables; ids encode `rendered` with no special token added

Usage:
    pip install -r scripts/requirements.txt
    python scripts/goldens.py            # (re)writes testdata/
    python scripts/goldens.py --check    # regenerates into a temporary folder and compares
    python scripts/goldens.py --only qwen3

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
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SEED = 20
TOKENS_NEW = 32
TOP = 20
MARGIN_MIN = 2e-3
DISTINCT_MIN = 14
# Around KV blocks of 16 and 32, the sliding window of 24 and the rope's original length of 64.
PROMPT_LENGTHS = [1, 2, 3, 7, 15, 16, 17, 23, 25, 31, 32, 33, 48, 63, 65, 80, 97, 113, 128, 150]
TEXT_PROMPTS = {3, 5, 8, 10, 12, 14, 15, 17, 19}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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

# === Chat templates, written for this test data in the manner of those in the wild ===

TEMPLATE_INST = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

TEMPLATE_INST_BLOCKS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{#- Turns alternate, counted in a namespace because a plain variable would not outlive the loop. #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages if message.role in ["user", "assistant"] %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user and assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user, system and assistant roles are supported, not " ~ message["role"]) }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATE_HEADER = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if with_date is defined and with_date and not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if system_message or tools is not none or date_string is defined %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
    {%- if date_string is defined %}
        {{- "Today Date: " + date_string + "\\n\\n" }}
    {%- endif %}
    {%- if tools is not none %}
        {{- "You have access to the following functions. Answer with JSON to call one.\\n\\n" }}
        {%- for t in tools %}
            {{- t | tojson(indent=4) }}
            {{- "\\n\\n" }}
        {%- endfor %}
    {%- endif %}
    {{- system_message }}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TEMPLATE_CHATML = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATE_CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{#- Only what follows the last real question keeps its thoughts. #}
{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and thought %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# === Tokenizers ===

SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_QWEN = SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(merges: int, split: str, normalizer, added: list[AddedToken], bos: str | None) -> Tokenizer:
    """A byte-level BPE as Llama 3 and Qwen ship it: bytes first, then merges, then the added tokens."""
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
    """BPE over characters with byte fallback, as converted from SentencePiece; spaces are written as U+2581.

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
        # Added but not special: they stay in the text when special tokens are skipped.
        added += [
            AddedToken(content, special=False, normalized=False)
            for content in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
        ]
    return byte_level(150, SPLIT_QWEN, normalizers.NFC(), added, bos=None)


# === Variants ===


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


def old(config: dict, dtype: str, rope_theta: float, rope_scaling: dict | None) -> dict:
    """The spelling of config.json up to transformers 4."""
    return config | {
        "torch_dtype": dtype,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "transformers_version": "4.44.0",
    }


def new(config: dict, dtype: str, rope_parameters: dict) -> dict:
    """The spelling of config.json since transformers 5."""
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
        TEMPLATE_INST,
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
        TEMPLATE_HEADER, shards=3, chat_extra=chats, tokenizer_texts=texts,
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
        TEMPLATE_HEADER, template_in_file=True, chat_extra=chats, tokenizer_texts=texts,
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
        TEMPLATE_INST_BLOCKS,
        chat_extra=[
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]},
        ],
        tokenizer_texts=["<s>text between marks</s>", "two  spaces▁mark"],
    )


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
        TEMPLATE_CHATML_TOOLS if tools else TEMPLATE_CHATML,
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


VARIANTS = {
    "llama2": llama2, "llama3": llama3, "llama3-new": llama3_new, "mistral": mistral, "qwen2": qwen2, "qwen2.5": qwen25,
    "qwen3": qwen3,
}

# === Checkpoints ===


def random_weights(config, seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 weights, large enough that the layers, not the token's own embedding, decide the next token."""
    with torch.device("meta"):
        names = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in sorted(names.items()):
        noise = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.5 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            weights[name] = 0.4 * noise
        else:
            weights[name] = noise * (1.4 / math.sqrt(size[1]))
    return weights


def write_weights(variant: Variant, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    dtype = DTYPES[variant.dtype]
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    if variant.leftover_inv_freq:
        # Checkpoints converted before transformers 4.32 carry these buffers; a loader must ignore them.
        head_dim = variant.config["hidden_size"] // variant.config["num_attention_heads"]
        inv_freq = 1.0 / variant.config["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        for layer in range(variant.config["num_hidden_layers"]):
            weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = inv_freq.clone()
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
    seed = SEED + zlib.crc32(variant.name.encode())
    write_weights(variant, folder, random_weights(AutoConfig.from_pretrained(folder), seed))


# === Goldens ===


@torch.no_grad()
def greedy(model, prompt: list[int]) -> dict | None:
    """The greedy path and its logits, or None where a margin is thin or the path is dull."""
    tokens, margin_min, first, last = list(prompt), math.inf, None, None
    for _ in range(TOKENS_NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
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
    return {"tokens": generated, "margin_min": round(margin_min, 5), "first_top_logits": first, "last_top_logits": last}


def draw_text(tokenizer: Tokenizer, rng: random.Random, length: int) -> str:
    """A piece of TEXT, starting at a word or at the space before it, of about `length` tokens."""
    starts = [i for i, c in enumerate(TEXT[: len(TEXT) * 3 // 4]) if c.isspace()]
    start = rng.choice(starts) + rng.randrange(2)
    end = start + 1
    while end < len(TEXT) and len(tokenizer.encode(TEXT[start : end + 1], add_special_tokens=False).ids) <= length:
        end += 1
    return TEXT[start:end]


def prompts(variant: Variant, model) -> list[dict]:
    cases = []
    for index, length in enumerate(PROMPT_LENGTHS):
        for attempt in range(1000):
            rng = random.Random(f"{SEED} {variant.name} {index} {attempt}")
            case = {}
            if index in TEXT_PROMPTS:
                text = draw_text(variant.tokenizer, rng, length)
                case["text"] = text
                case["prompt_tokens"] = variant.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                case["prompt_tokens"] = [rng.randrange(variant.config["vocab_size"]) for _ in range(length)]
            path = greedy(model, case["prompt_tokens"])
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
    # Half an emoji, specials in the middle, and ids at random, which are mostly not valid UTF-8 together.
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
    """One case to a line, so that a change shows as the cases it touches."""
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
    # The reference sees what is stored: 16-bit weights are read back and widened.
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
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
    """Every file byte by byte, but goldens.json by value: logits may move in the fifth digit between machines."""
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


def close(a, b) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return abs(a - b) <= 5e-4
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
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "testdata")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="one variant; may be repeated")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    args = parser.parse_args()
    # One thread: sums are then made in one order on every machine of a kind.
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
