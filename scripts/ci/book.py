#!/usr/bin/env python3
"""Builds the documents as a book with search, by mdBook.

    scripts/ci/book.py --out target/book [--mdbook PATH]

Chapters have the order in which docs/README.md links to pages; pages that only other pages link to (decisions) follow
in their folder. mdBook is the program of --mdbook, or is built once from the crates' registry into target/tools. Exit
status 1: a page is in no chapter, mdBook warns, or a link of the book leads nowhere.
"""

import argparse
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MDBOOK_VERSION = "0.4.52"
# Pages outside docs/.
BESIDE = ("README.md", "ARCHITECTURE.md", "helm/cleave/README.md", "assets/demo/README.md")
CONFIG = """[book]
title = "Cleave"
language = "en"
src = "src"

[output.html]
default-theme = "light"
no-section-label = true

[output.html.search]
limit-results = 20
"""


def title(page):
    """Returns the first heading of a page."""
    heading = re.search(r"^# (.+)$", page.read_text(), re.M)
    return heading[1].strip() if heading else page.stem


def linked(page):
    """Returns the pages that a page links to, in order."""
    for link in re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text()):
        target = (page.parent / link).resolve()
        if target.exists():
            yield target


def chapters(source):
    """Returns all pages as (depth, page): those that docs/README.md links to in its order, each followed by its
    folder's."""
    index = source / "docs" / "README.md"
    order, seen = [], set()
    top = (index, source / "README.md")

    def add(depth, page):
        if page in seen:
            return
        seen.add(page)
        order.append((depth, page))
        if page.name == "README.md" and page.parent not in (source, source / "docs"):
            for below in sorted(page.parent.glob("*.md")):
                add(depth + 1, below)

    for page in (source / "README.md", source / "ARCHITECTURE.md", index):
        add(0, page)
    for page in linked(index):
        folder = page.parent / "README.md"
        add(0, folder if folder.exists() and folder not in top else page)
    for page in sorted(source.rglob("*.md")):
        folder = page.parent / "README.md"
        add(0, folder if folder.exists() and folder not in top else page)
    return order


def assemble(out):
    """Copies the documents, and writes the table of contents."""
    source = out / "src"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source / "docs")
    results = sorted(page.relative_to(ROOT) for page in ROOT.glob("results/*/*.md"))
    for name in (*BESIDE, *results):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    (out / "book.toml").write_text(CONFIG)
    toc = chapters(source.resolve())
    lines = ["# Summary", ""]
    for depth, page in toc:
        lines.append("  " * depth + f"- [{title(page)}]({page.relative_to(source.resolve())})")
    (source / "SUMMARY.md").write_text("\n".join(lines) + "\n")
    # mdBook writes a README as index.html, and does not change links to it.
    for page in source.rglob("*.md"):
        if page.name != "SUMMARY.md":
            page.write_text(re.sub(r"(\]\([^)\s]*)README\.md", r"\1index.md", page.read_text()))
    return len(lines) - 2


def find_mdbook(given):
    """Returns the program, and builds it if it is missing."""
    found = given or shutil.which("mdbook")
    if found:
        return found
    tools = ROOT / "target" / "tools"
    program = tools / "bin" / "mdbook"
    if not program.exists():
        command = ["cargo", "install", "mdbook", "--version", MDBOOK_VERSION, "--locked", "--root", str(tools)]
        subprocess.run(command, check=True)
    return str(program)


class Links(html.parser.HTMLParser):
    """Collects links and anchors of one page of the book."""

    def __init__(self):
        super().__init__()
        self.links, self.anchors = [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.anchors.add(attrs["id"])
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])


def lost_links(book):
    """Lists links within the book that lead nowhere; links to files of the repository stay as they are."""
    read = {}
    for page in book.rglob("*.html"):
        # print.html has all pages in one; its links are relative to the place of each page.
        if page.name == "print.html":
            continue
        parser = Links()
        parser.feed(page.read_text())
        read[page.resolve()] = parser
    lost = []
    for page, parser in read.items():
        for link in parser.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target.suffix == ".html" and target.name != "print.html" and target not in read:
                lost.append(f"{page.name}: {link}")
            elif anchor and target in read and anchor not in read[target].anchors:
                lost.append(f"{page.name}: {link}: no such heading")
    return lost


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target" / "book", help="folder of the book")
    parser.add_argument("--mdbook", help="the program; else from PATH, else built")
    arguments = parser.parse_args()
    program = find_mdbook(arguments.mdbook)
    pages = assemble(arguments.out)
    built = subprocess.run([program, "build", str(arguments.out)], capture_output=True, text=True, check=False)
    sys.stderr.write(built.stderr)
    if built.returncode or re.search(r"\b(WARN|ERROR)\b", built.stderr + built.stdout):
        sys.exit("mdBook did not build the pages without a warning")
    lost = lost_links(arguments.out / "book")
    for line in lost:
        print(line)
    if lost or not (arguments.out / "book" / "searchindex.json").exists() and not list((arguments.out / "book").glob("searchindex*")):
        sys.exit("links of the book lead nowhere, or it has no search")
    print(f"{pages} chapters in {arguments.out / 'book' / 'index.html'}")


if __name__ == "__main__":
    main()
