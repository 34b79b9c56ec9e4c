"""Reads documentation into pages of sections: the HTML that rustup installs, and Markdown of other books and of Cleave.

Blocks that repeat others, that are mostly signs, or long code are left out.
"""

import re
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

# === HTML ===

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


# === Markdown ===

# HTML's own tags, since `Vec<T>` has none.
TAGS = re.compile(
    r"<!--.*?-->|<style.*?</style>|</?(details|summary|div|span|p|br|img|a|sup|sub|kbd|em|strong|b|i|h[1-6]|ul|ol|li|table|"
    r"thead|tbody|tr|td|th|pre|section|figure|script|video|iframe)(\s[^<>]*)?/?>",
    re.DOTALL,
)
INLINE = [
    (re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])"), ""),
    (re.compile(r"\[\^[^\]]*\]:?"), ""),
    (re.compile(r"\[([^\]]+)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"\{\{.*?\}\}|\{%.*?%\}"), ""),
    (re.compile(r"\*\*|(?<![\w*])\*(?=\w)|(?<=[\w.,])\*(?![\w*])|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)"), ""),
]


def inline(text: str) -> str:
    """Returns a paragraph without links, emphasis and tags; what stands between backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", TAGS.sub("", text))
    text = "\0".join(part for part in parts[::2])
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    plain_parts, codes = text.split("\0"), parts[1::2] + [""]
    if len(plain_parts) != len(codes):
        return text.replace("\0", "")
    return "".join(words + code for words, code in zip(plain_parts, codes))


def read_markdown(source: str) -> list[Section]:
    """Returns a page's sections. Tables, link lists, front matter and figures are left out."""
    source = re.sub(r"\A(---|\+\+\+)\n.*?\n\1\n", "", TAGS.sub("", source), flags=re.DOTALL)
    sections, kind, text = [Section("")], "p", []

    def flush():
        whole = "\n".join(text) if kind == "code" else " ".join(inline(" ".join(text)).split())
        if whole.strip():
            sections[-1].blocks.append((kind, whole))
        text.clear()

    fence = None
    for line in source.splitlines():
        bare = line.strip()
        if fence:
            if bare.startswith(fence):
                flush()
                fence, kind = None, "p"
            elif not re.match(r"#( |$)|// (Copyright|SPDX)", bare):
                # Lines that begin with a # are hidden in the rendered book.
                text.append(line)
            continue
        opening = re.match(r"(`{3,}|~{3,})", bare)
        item = re.match(r"([-*+]|\d+\.)\s+", bare)
        heading = re.match(r"(#{1,5})\s+(.*?)(\s+\{\s*#.*\})?\s*#*$", bare)
        if opening:
            flush()
            fence, kind = opening[1], "code"
        elif heading:
            flush()
            kind = "p"
            sections.append(Section(inline(heading[2]).strip()))
        elif item:
            flush()
            kind = "li"
            text.append(bare[item.end() :])
        elif not bare or bare[0] == "|" or re.match(r"\[[^\]]+\]:|[=-]{3,}$", bare):
            flush()
            kind = "p"
        else:
            text.append(bare.lstrip("> "))
    flush()
    return sections


@dataclass
class Book:
    """Markdown of one source: its address, the folder in its clone, patterns of its pages."""

    name: str
    address: str
    folder: str
    pages: tuple[str, ...] = ("**/*.md",)
    code: bool = False


MARKDOWN = [
    Book("async-book", "https://github.com/rust-lang/async-book", "src", code=True),
    Book("api-guidelines", "https://github.com/rust-lang/api-guidelines", "src"),
    Book("tokio", "https://github.com/tokio-rs/website", "content/tokio", code=True),
    Book("comprehensive-rust", "https://github.com/google/comprehensive-rust", "src", code=True),
]
CLEAVE = Book(
    "cleave",
    "",
    "",
    ("README.md", "ARCHITECTURE.md", "docs/*.md", "docs/guides/*.md", "docs/design/*.md", "docs/contributing/*.md"),
)
UNREAD = re.compile(
    r"(^|/)(SUMMARY|README|translations|credits|cli|metrics|lessons|01_translations)\.md$|/exercise|running-the-course"
    r"|^src/(android|bare-metal|chromium|running)"
)


def read_book(book: Book, root: Path, seen: set[str]):
    """Yields (path, sections) of a clone's newest commit, or of this repository's files."""
    for name, source in sorted(files_of(book, root)):
        if UNREAD.search(name) and name != "README.md":
            continue
        sections = []
        for section in read_markdown(source):
            blocks = []
            for kind, text in section.blocks:
                text = plain(text)
                short_code = kind == "code" and book.code and text.count("\n") < CODE_LINES_MAX
                short_code = short_code and text.isascii() and "{{#" not in text
                if (short_code or kind != "code" and wanted(kind, text, book.name)) and key(text) not in seen:
                    seen.add(key(text))
                    blocks.append((kind, text))
            if any(kind == "p" for kind, _ in blocks):
                sections.append(Section(plain(section.heading), None, blocks))
        if sections:
            yield name, sections


def files_of(book: Book, root: Path):
    if not book.address:
        paths = [path for pattern in book.pages for path in root.glob(pattern)]
        yield from ((path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
        return
    clone = root / book.address.rsplit("/", 1)[1]

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", clone, *command], capture_output=True, check=True).stdout.decode()

    for name in git("ls-tree", "-r", "--name-only", "HEAD", f"{book.folder}/").splitlines():
        if name.endswith(".md"):
            yield name, git("show", f"HEAD:{name}")
