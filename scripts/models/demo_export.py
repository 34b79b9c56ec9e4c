"""Writes the trained demo as a Hugging Face folder of four bits, checks it by transformers, and records its answers.

The layout is compressed-tensors' pack-quantized: the projections in four bits with a bf16 scale for each group of 64,
the embedding (which is the head too) and norms in bf16.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_chats import END_OF_TEXT, TURN_END, TURN_START, handwritten, split_questions
from demo_model import BITS, GROUP, SHAPES, Llama, groups_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
# The first is README's example. The others are held out: no question of these words was trained.
ASKED = ["What is a slice?"]
ASKED_COUNT = 5

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODEL_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, demo, compressed-tensors]
---

# Cleave demo

A Llama of {parameters:.1f} million parameters that comes with Cleave, so that there is something to serve without a
download. It answers short questions about Rust and about Cleave, and continues English prose about them. It is small: an
answer outside of what it learned is often wrong. Use it to see tokens flow, not to learn Rust.

| | |
|---|---|
| Shape | {num_hidden_layers} layers, hidden {hidden_size}, {num_attention_heads} heads over {num_key_value_heads} KV heads of {head_dim}, MLP {intermediate_size}, tied embeddings |
| Context | {max_position_embeddings} tokens |
| Vocabulary | {vocab_size}, byte-level BPE trained on Rust's documentation |
| Weights | {size:.1f} MB: projections in four bits with a bf16 scale for each {group} (compressed-tensors, pack-quantized), the rest in bfloat16 |
| Chat | `<\\|im_start\\|>role`, newline, content, `<\\|im_end\\|>`; template in `tokenizer_config.json` |

## Data

| source | licence | copyright |
|---|---|---|
| The documentation that rustup installs: The Rust Programming Language, the Reference, Rust by Example, the Rustonomicon, the Edition Guide, the Cargo, rustc, rustdoc, Clippy, Style and Unstable books, the error index, and the prose of std's pages | MIT OR Apache-2.0 | the Rust project's contributors |
| Asynchronous Programming in Rust | MIT | Aaron Turon and contributors |
| Rust API Guidelines | MIT OR Apache-2.0 | the Rust project's contributors |
| Tokio's tutorial, topics and glossary | MIT | Carl Lerche and contributors of Tokio's pages |
| [Comprehensive Rust](https://github.com/google/comprehensive-rust) | text [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/), examples Apache-2.0 | Google LLC and contributors |
| Cleave's own pages | Apache-2.0 | Cleave's contributors |
| {answers} answers with {questions} questions, written for this purpose: `scripts/models/demo_questions.jsonl` | Apache-2.0 | Cleave's contributors |

Texts were shortened: tables, figures and long examples are left out. Paragraphs appear once more as answers to questions
made from their headings. The Embedded Book is left out, its prose being CC-BY-SA-4.0.

## Training

`scripts/models/train_demo.py`, plain PyTorch: {how}Muon for the matrices and AdamW for the rest,
cosine schedule, windows of 256 tokens and towards the end of 1024, where products use weights rounded to four bits.

{losses}

## Licence

Apache-2.0. The data's licences are in the table above.
"""

LOSSES = {
    "rust": "held-out pages of Rust's documentation",
    "more": "held-out pages of the other sources",
    "questions": "held-out wordings of questions, with their answers",
}


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors of one projection: eight codes in each word, the first lowest."""
    integers, scales = groups_of(weight)
    codes = (integers.flatten(1) + 2 ** (BITS - 1)).to(torch.int64).unflatten(1, (-1, 32 // BITS))
    words = (codes << torch.arange(0, 32, BITS)).sum(dim=2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        "weight_packed": words.contiguous(),
        "weight_scale": scales.squeeze(2).bfloat16().contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def tensors_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, value in weights.items():
        if value.dim() == 2 and "embed" not in name:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor for part, tensor in packed(value.cpu().float()).items()}
        else:
            tensors[name] = value.cpu().to(torch.bfloat16).contiguous()
    return tensors


QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": BITS,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def losses_table(state: dict, bytes_per_token: dict[str, float]) -> str:
    lines = ["| text | nats a token | in four bits | bits a byte, in four bits |", "|---|---|---|---|"]
    for name, shown in LOSSES.items():
        four = state["loss_rounded"][name]
        bits = four / math.log(2) / bytes_per_token[name]
        lines.append(f"| {shown} | {state['loss'][name]:.3f} | {four:.3f} | {bits:.3f} |")
    return "\n".join(lines)


def bytes_per_token(work: Path, tokenizer: Tokenizer) -> dict[str, float]:
    sizes = {}
    for name in LOSSES:
        tokens = np.load(work / f"held-{name}.npy").tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        sizes[name] = len(text.encode()) / len(tokens)
    return sizes


def export(args) -> None:
    work, out = args.work, args.out
    state = torch.load(work / "checkpoint.pt", weights_only=True, map_location="cpu")
    config = SHAPES[state["shape"]]
    dense = state["shape"] != "demo"
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end, start, stop = (tokenizer.token_to_id(t) for t in (END_OF_TEXT, TURN_START, TURN_END))
    out.mkdir(parents=True, exist_ok=True)
    if dense:
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["weights"].items()}
    else:
        tensors = tensors_of(state["weights"])
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    # So small a model is at its best near its likeliest tokens.
    generation = {"eos_token_id": [stop, end], "pad_token_id": end, "do_sample": True, "temperature": 0.3, "top_p": 0.9}
    model_config = config | {"bos_token_id": None, "eos_token_id": [stop, end], "pad_token_id": end}
    files = {
        "config.json": model_config if dense else model_config | {"quantization_config": QUANTIZATION},
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    if not dense:
        entries = handwritten()
        card = MODEL_CARD.format(
            parameters=sum(tensor.numel() for tensor in state["weights"].values()) / 1e6,
            size=(out / "model.safetensors").stat().st_size / 1e6,
            group=GROUP,
            questions=sum(len(entry.by_hand) for entry in entries),
            answers=len(entries),
            how=f"{state['seen'] / 1e6:.1f} million tokens on {args.machine}, ",
            losses=losses_table(state, bytes_per_token(work, tokenizer)),
            **config,
        )
        (out / "README.md").write_text(card, encoding="utf-8")
    total = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {total / 1e6:.2f} MB, after {state['seen']} tokens, held-out {state['loss_rounded']}")


# === Checks and answers ===


def check(args) -> None:
    """Compares the folder, as transformers and compressed-tensors read it, with the rounded weights, in f32."""
    import transformers

    transformers.logging.set_verbosity_error()
    state = torch.load(args.work / "checkpoint.pt", weights_only=True, map_location="cpu")
    ours = Llama(SHAPES[state["shape"]])
    ours.load_state_dict(state["weights"])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                integers, scales = groups_of(parameter)
                parameter.copy_((integers * scales).flatten(1))
            else:
                parameter.copy_(parameter.bfloat16())
    quantization = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        args.out, dtype=torch.float32, quantization_config=quantization
    ).eval()
    ids = torch.from_numpy(np.load(args.work / "held-rust.npy")[:1025].astype(np.int64)).view(1, -1)
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits
        their_loss = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        our_loss = float(ours(ids[:, :-1], ids[:, 1:]))
    print(f"1024 held-out tokens: {our_loss:.5f} nats by this script, {their_loss:.5f} by transformers")
    if abs(our_loss - their_loss) > 1e-3:
        sys.exit("the exported folder does not hold the rounded weights")


def prompt_of(question: str) -> str:
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def questions_asked() -> list[str]:
    """Returns README's example and held-out wordings, spread over the file of questions."""
    _, held = split_questions(handwritten())
    step = len(held) // (ASKED_COUNT - len(ASKED))
    return ASKED + [held[index * step + step // 2][0] for index in range(ASKED_COUNT - len(ASKED))]


def answer_by_cleave(cleave: Path, folder: Path, question: str) -> str:
    command = [cleave, "generate", "--model", folder, "--json", "--max-tokens", "100", "--prompt", prompt_of(question)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(made.stdout)["text"].removesuffix(TURN_END).strip()


def ask(args) -> None:
    """Records the losses and five answers in docs/models.md."""
    state = torch.load(args.work / "checkpoint.pt", weights_only=True, map_location="cpu")
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    lines = [losses_table(state, bytes_per_token(args.work, tokenizer)), "", "| question | answer |", "|---|---|"]
    for question in questions_asked():
        answer = " ".join(answer_by_cleave(args.cleave, args.out, question).split()).replace("|", "\\|")
        print(f"{question}\n    {answer}")
        lines.append(f"| {question} | {answer} |")
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- demo: begin, by scripts/models/train_demo.py ask -->", "<!-- demo: end -->"
    if begin not in page:
        page += f"\n## The bundled checkpoint\n\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}", encoding="utf-8")
