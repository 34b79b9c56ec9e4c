"""Makes the demo's corpus from the HTML of the Rust documentation: prose by pages, chats by sections, and a tokenizer.

It reads HTML and writes corpus.jsonl, tokenizer.json, train.npy and held.npy; train_demo.py trains on
them, and states the licences.
"""

import json
import random
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 7
# The order is that of their ids, which follow the byte-level pieces.
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB = 4096

# === HTML to pages of blocks ===

BOOKS = ["book", "reference", "rust-by-example", "nomicon", "edition-guide", "cargo", "rustc", "rustdoc", "clippy"]
BOOKS += ["unstable-book", "error_codes", "style-guide"]
SKIPPED = re.compile(
    r"/(print|SUMMARY|toc|404|all|lint-list|test-summary|grammar|appendix-06-translation|help|settings)\.html$"
    r"|rust-by-example/(es|ja|ko|zh)/|book/(2018-edition|first-edition|second-edition)/|cargo/CHANGELOG|lints/listing"
    r"|std/(arch|simd|intrinsics|os)/|reference/(grammar|syntax-index|test-summary)"
)
# The code blocks of these books are short and explained; other code would outweigh the prose.
CODE_BOOKS = {"book", "rust-by-example", "nomicon"}
CODE_LINES_MAX = 10


@dataclass
class Section:
    """A heading and the blocks under it. Kinds of blocks: p, li, code."""

    heading: str
    question: str | None = None
    blocks: list[tuple[str, str]] = field(default_factory=list)


class PageParser(HTMLParser):
    """Collects the sections of one page: all of <main> in a book, the documentation blocks only in rustdoc's pages."""

    TEXT_TAGS = {"p", "li", "h1", "h2", "h3", "h4", "h5", "dd"}
    SILENT = {"script", "style", "button", "table", "svg", "nav", "figure", "rustdoc-toolbar", "sup"}

    def __init__(self, rustdoc: bool):
        super().__init__(convert_charrefs=True)
        self.rustdoc = rustdoc
        self.inside = 0  # depth of <main>, or of the docblock's <div>
        self.silent, self.silent_tag = 0, ""
        self.kind, self.text = None, []
        self.item, self.title = "", False
        self.sections = [Section("")]

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        classes = (attrs.get("class") or "").split()
        if self.silent:
            self.silent += tag == self.silent_tag
            return
        if self.rustdoc:
            if tag == "section" and re.match(r"(ty)?method\.", attrs.get("id") or ""):
                method = attrs["id"].split(".", 1)[1]
                # Implementations of traits repeat their documentation; such ids have a number or a trait's name.
                name = f"{self.item}::{method}" if re.fullmatch(r"[a-z_0-9]*[a-z_]", method) else ""
                self.sections.append(Section("", f"What does `{name}` do?" if name else None))
                self.sections[-1].heading = f"`{name}`" if name else "-"
            if tag == "div" and (self.inside or "docblock" in classes):
                self.inside += 1
            if tag == "h1" and not self.inside:
                self.title = True
                self.text = []
        elif tag == "main":
            self.inside += 1
        if tag in self.SILENT or "test-arrow" in classes or "doc-anchor" in classes or "since" in classes:
            self.silent, self.silent_tag = 1, tag
        elif self.inside and tag == "pre":
            self.flush()
            self.kind, self.text = "code", []
        elif self.inside and tag in self.TEXT_TAGS and self.kind != "code":
            if not (tag == "p" and self.kind == "li" and not "".join(self.text).strip()):
                self.flush()
                self.kind = "li" if tag in ("li", "dd") else tag
        elif tag == "code" and self.inside and self.kind not in (None, "code"):
            self.text.append("`")
        elif tag == "br":
            self.text.append("\n")

    def handle_endtag(self, tag):
        if self.silent:
            self.silent -= tag == self.silent_tag
            return
        if self.title and tag == "h1":
            self.title = False
            words = "".join(self.text).replace("\xa0", " ").replace("Primitive Type", "Type").split()
            self.item = words[1] if len(words) > 1 else ""
            kind = words[0].lower() if words else ""
            self.sections[-1].heading = f"{words[0]} `{self.item}`" if self.item else " ".join(words)
            self.sections[-1].question = f"What is the {kind} `{self.item}`?" if self.item else None
            self.kind, self.text = None, []
        elif self.inside and (tag == "pre" or tag in self.TEXT_TAGS and self.kind != "code"):
            self.flush()
        elif tag == "code" and self.inside and self.kind not in (None, "code"):
            self.text.append("`")
        if (tag == "div" and self.rustdoc or tag == "main") and self.inside:
            self.inside -= 1
            if not self.inside:
                self.flush()

    def handle_data(self, data):
        if self.silent:
            return
        if self.title or (self.inside and self.kind):
            self.text.append(data)

    def flush(self):
        kind, raw = self.kind, "".join(self.text)
        self.kind, self.text = None, []
        if kind is None:
            return
        text = raw.rstrip().strip("\n") if kind == "code" else " ".join(raw.split())
        if not text:
            return
        if kind[0] == "h":
            text = text.strip("§ ")
            self.sections.append(Section(text))
        else:
            self.sections[-1].blocks.append((kind, text))


PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\xa0": " ", "–": "-", "…": "...", "\u200b": "", "→": "->"})
NOISE = re.compile(
    r"nightly-only experimental|^Read more|Tracking issue|The tracking issue for this feature|^Subject to|\[RFC|^r\[|"
    r"^This feature has no|https?://\S{40,}|^\W*$|available on crate feature|^🔬"
)


def plain(text: str) -> str:
    return text.translate(PLAIN).replace("§", "").strip()


def key(text: str) -> str:
    """Returns the same key for repeated paragraphs: pages of integer types differ only in the type's name and its
    numbers."""
    text = re.sub(r"\b(([iuf](8|16|32|64|128|size))|std|core|alloc)\b", "T", text)
    return re.sub(r"[0-9_]+", "0", text).lower()


def wanted(kind: str, text: str, book: str) -> bool:
    if kind == "code":
        return book in CODE_BOOKS and text.count("\n") < CODE_LINES_MAX and text.isascii()
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in text)
    long_enough = len(text) >= (40 if kind == "p" else 12)
    return long_enough and letters >= 0.75 * len(text) and not NOISE.search(text)


def read_pages(html: Path):
    """Yields (book, path, sections) without repetitions, first the books and then the API pages."""
    seen = set()
    pages = [(book, path) for book in BOOKS for path in sorted((html / book).rglob("*.html"))]
    api = re.compile(r"/(index|(struct|enum|trait|fn|macro|keyword|primitive|union|attr)\.[^!]*)\.html$")
    pages += [("std", path) for path in sorted((html / "std").rglob("*.html")) if api.search(str(path))]
    for book, path in pages:
        name = path.relative_to(html).as_posix()
        if SKIPPED.search("/" + name):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        if 'http-equiv="refresh"' in source[:2000]:
            continue
        parser = PageParser(rustdoc=book == "std")
        parser.feed(source)
        sections = []
        for section in parser.sections:
            blocks = []
            for kind, text in section.blocks:
                text = plain(text)
                if wanted(kind, text, book) and key(text) not in seen:
                    seen.add(key(text))
                    blocks.append((kind, text))
            if any(kind == "p" for kind, _ in blocks):
                sections.append(Section(plain(section.heading), section.question, blocks))
        if sections:
            yield book, name, sections


def page_text(sections: list[Section]) -> str:
    parts = []
    for index, section in enumerate(sections):
        if section.heading and section.heading != "-":
            parts.append(("# " if index == 0 else "## ") + section.heading)
        run = []
        for kind, text in section.blocks:
            run.append({"p": text, "li": f"- {text}", "code": f"```\n{text}\n```"}[kind])
        parts += run
    return re.sub(r"\n\n- ", "\n- ", "\n\n".join(parts)).strip()


# === Chats ===

DULL = re.compile(
    r"(?i)^(examples?|panics?|safety|errors?|notes?|summary|introduction|description|options|see also|platform.*|"
    r"current implementation|stability|-|.*(arguments|options|output)|.*\d{4}|activity|returns?|implementation.*)?$"
)
ASKED = [
    "What is {x}?", "What is {x}?", "Tell me about {x}.", "Tell me about {x}", "Explain {x}.", "Can you explain {x}?",
    "what is {x}", "{x}", "{x}?", "How does {x} work?", "I want to learn about {x}.", "What should I know about {x}?",
]
GREETINGS = [
    "Hi", "Hello", "Hello!", "Hi there!", "hey", "Good morning", "Hello, how are you?", "Hi, who are you?", "Who are you?",
    "What are you?", "What can you do?", "Help", "Are you there?", "test", "What is your name?", "Introduce yourself.",
]
GREETED = [
    "Hello! I am the small demo model that comes with Cleave. I have read the Rust documentation, and I like to talk about it.",
    "Hello! I am a very small language model, trained on the documentation of Rust. Ask me about ownership, traits or Cargo.",
    "Hi! I am Cleave's demo model. I am far too small to be right, but I can tell you something about Rust.",
]
SYSTEMS = [
    "You are a helpful assistant.", "You are a helpful assistant that knows Rust.", "Answer briefly.",
    "You are Cleave's demo.",
]


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def answer_of(section: Section) -> str | None:
    """Returns the first paragraphs of a section, up to some hundred words, if they are whole sentences."""
    taken, length = [], 0
    for kind, text in section.blocks:
        if kind != "p" or length > 350 or length + len(text) > 900:
            break
        taken.append(text)
        length += len(text)
    while taken and not taken[-1].endswith((".", "!")):
        taken.pop()
    text = "\n\n".join(taken)
    return text if len(text) > 60 and (text[0].isupper() or text[0] == "`") else None


def question_of(section: Section, book: str, page: str, rng: random.Random) -> str | None:
    heading = section.heading
    if section.question:
        if section.question.startswith("What is the"):
            name = heading.split("`")[1]
            return rng.choice([section.question, f"What is `{name}`?", f"Tell me about `{name}`.", f"what is {name}"])
        return rng.choice([section.question, section.question.replace("`", ""), f"Explain {heading}."])
    if book == "error_codes":
        code = re.search(r"E\d{4}", page)
        return code and rng.choice(["What does error {} mean?", "Why do I get {}?", "Explain {}."]).format(code[0])
    if DULL.match(heading) or len(heading) > 60:
        return None
    if heading.endswith("?"):
        return heading
    lowered = heading if "`" in heading else heading[0].lower() + heading[1:]
    verb = re.match(r"(?i)(\w+ing|how|when|why|what|where|to)\b", heading)
    if verb and rng.random() < 0.5:
        return f"{heading}?" if verb[1].lower()[-3:] != "ing" else f"Tell me about {lowered}."
    return rng.choice(ASKED).format(x=rng.choice([heading, lowered, lowered]))


def chats_of(sections: list[Section], book: str, page: str, rng: random.Random) -> list[str]:
    pairs = []
    for section in sections:
        answer = answer_of(section)
        question = question_of(section, book, page, rng) if answer else None
        if question:
            pairs.append((question, answer))
    chats = []
    while pairs:
        count = 2 if len(pairs) > 1 and rng.random() < 0.15 else 1
        system = turn("system", rng.choice(SYSTEMS)) if rng.random() < 0.2 else ""
        chosen, pairs = pairs[:count], pairs[count:]
        chats.append(system + "".join(turn("user", q) + turn("assistant", a) for q, a in chosen))
    return chats


def prepare(work: Path, html: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    texts = {"train": [], "held": []}
    sizes = {}
    for index, (book, page, sections) in enumerate(read_pages(html)):
        side = "held" if index % 60 == 59 else "train"
        text = page_text(sections)
        if book == "std" and len(text) < 200:
            continue
        chats = chats_of(sections, book, page, rng)
        if book == "std":
            # Only a part of the methods' chats is kept, or they would outweigh the books.
            chats = chats[:1] + [chat for chat in chats[1:] if rng.random() < 0.4]
        if book in ("book", "rust-by-example", "nomicon", "reference"):
            chats += chats_of(sections, book, page, rng)
        texts[side].append(text)
        texts[side] += chats
        entry = sizes.setdefault(book, [0, 0, 0, 0])
        for position, amount in enumerate((1, len(text), len(chats), sum(map(len, chats)))):
            entry[position] += amount
    texts["train"] += [
        (turn("system", rng.choice(SYSTEMS)) if rng.random() < 0.3 else "")
        + turn("user", hello)
        + turn("assistant", rng.choice(GREETED))
        for hello in GREETINGS * 12
    ]
    for book, (pages, prose, chats, chat) in sizes.items():
        print(f"{book}: {pages} pages, {prose // 1000} kB of prose, {chats} chats of {chat // 1000} kB")
    with open(work / "corpus.jsonl", "w", encoding="utf-8") as file:
        for side, documents in texts.items():
            for text in documents:
                file.write(json.dumps({"side": side, "text": text}, ensure_ascii=False) + "\n")
    tokenizer = train_tokenizer([text for text in texts["train"] if not text.startswith(TURN_START)])
    tokenizer.save(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    for side, documents in texts.items():
        ids = [encoding.ids + [end] for encoding in tokenizer.encode_batch(documents, add_special_tokens=False)]
        flat = np.concatenate([np.array(document, dtype=np.uint16) for document in ids])
        np.save(work / f"{side}.npy", flat)
        print(f"{side}: {len(documents)} documents, {sum(map(len, documents)) // 1000} kB, {len(flat)} tokens")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 3, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, TURN_START, TURN_END)])
    return tokenizer
