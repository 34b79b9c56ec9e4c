"""Makes the demo's corpus: prose by pages, chats by sections and by hand, and a tokenizer.

It writes tokenizer.json, prose.npy, chats.npy, questions.npy and held-*.npy; train_demo.py trains on them, and the
model card in demo_export.py states the licences.
"""

import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo_chats import END_OF_TEXT, TURN_END, TURN_START, chats_of, handwritten, handwritten_chats, split_questions
from demo_pages import CLEAVE, MARKDOWN, Book, page_text, read_book, read_pages

SEED = 7
VOCAB = 4096
ROOT = Path(__file__).resolve().parents[2]
# Of these books the headings make questions twice, with other words.
TWICE = ("book", "rust-by-example", "nomicon", "reference")
PARTS = ("prose", "chats", "questions")
HELD = ("held-rust", "held-more", "held-questions")


class Corpus:
    """Documents by part: prose, chats by rule, questions by hand, and the held-out ones."""

    def __init__(self):
        self.rng = random.Random(SEED)
        self.parts: dict[str, list[str]] = {name: [] for name in PARTS + HELD}
        self.sizes: dict[str, list[int]] = {}

    def add_page(self, book: str, page: str, sections, held: str | None) -> None:
        text = page_text(sections)
        if book == "std" and len(text) < 200:
            return
        # Cleave's headings below the title mean something only on their page.
        chats = chats_of(sections[:1] if book == CLEAVE.name else sections, book, page, self.rng)
        if book == "std":
            # Only a part of the methods' chats is kept, or they would outweigh the books.
            chats = chats[:1] + [chat for chat in chats[1:] if self.rng.random() < 0.4]
        if book in TWICE:
            chats += chats_of(sections, book, page, self.rng)
        self.parts[held or "prose"].append(text)
        self.parts[held or "chats"] += chats
        entry = self.sizes.setdefault(book, [0, 0, 0, 0])
        for position, amount in enumerate((1, len(text), len(chats), sum(map(len, chats)))):
            entry[position] += amount

    def add_rust(self, html: Path) -> None:
        for index, (book, page, sections) in enumerate(read_pages(html)):
            self.add_page(book, page, sections, "held-rust" if index % 60 == 59 else None)

    def add_book(self, book: Book, root: Path) -> None:
        seen: set[str] = set()
        for index, (page, sections) in enumerate(read_book(book, root, seen)):
            self.add_page(book.name, page, sections, "held-more" if index % 30 == 29 else None)

    def add_handwritten(self) -> None:
        learned, held = split_questions(handwritten())
        self.parts["questions"] += handwritten_chats(learned, self.rng)
        self.parts["held-questions"] += handwritten_chats(held, self.rng)
        print(f"by hand: {len(learned)} questions, {len(held)} held out")

    def write(self, work: Path, tokenizer: Tokenizer) -> None:
        end = tokenizer.token_to_id(END_OF_TEXT)
        for part, documents in self.parts.items():
            ids = [encoding.ids + [end] for encoding in tokenizer.encode_batch(documents, add_special_tokens=False)]
            flat = np.concatenate([np.array(document, dtype=np.uint16) for document in ids])
            np.save(work / f"{part}.npy", flat)
            print(f"{part}: {len(documents)} documents, {sum(map(len, documents)) // 1000} kB, {len(flat)} tokens")


def prepare(work: Path, html: Path, clones: Path | None, kept: Path | None) -> None:
    """Writes the corpus. Without clones, books that are not on this machine are left out."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus()
    corpus.add_rust(html)
    for book in MARKDOWN if clones else []:
        corpus.add_book(book, clones)
    corpus.add_book(CLEAVE, ROOT)
    corpus.add_handwritten()
    for book, (pages, prose, chats, chat) in corpus.sizes.items():
        print(f"{book}: {pages} pages, {prose // 1000} kB of prose, {chats} chats of {chat // 1000} kB")
    tokenizer = Tokenizer.from_file(str(kept)) if kept else train_tokenizer(corpus.parts["prose"])
    tokenizer.save(str(work / "tokenizer.json"), pretty=False)
    corpus.write(work, tokenizer)


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
