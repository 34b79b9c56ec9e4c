"""Makes chats: by rule from the headings and first paragraphs of pages, and from the questions written by hand."""

import json
import random
import re
from pathlib import Path

from demo_pages import Section

# The order is that of their ids, which follow the byte-level pieces.
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QUESTIONS = Path(__file__).with_name("demo_questions.jsonl")

# === By rule ===

DULL = re.compile(
    r"(?i)^(examples?|panics?|safety|errors?|notes?|summary|introduction|description|options|see also|platform.*|"
    r"current implementation|stability|-|.*(arguments|options|output)|.*\d{4}|activity|returns?|implementation.*)?$"
)
ASKED = [
    "What is {x}?", "What is {x}?", "Tell me about {x}.", "Tell me about {x}", "Explain {x}.", "Can you explain {x}?",
    "what is {x}", "{x}", "{x}?", "How does {x} work?", "I want to learn about {x}.", "What should I know about {x}?",
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


# === By hand ===


FORMS = [
    "What {verb} {x}?", "Explain {x}.", "Tell me about {x}.", "Can you explain {x}?", "what {verb} {x}",
    "What {verb} {x} in Rust?", "I want to learn about {x}.", "{x}",
]


def handwritten() -> list[tuple[list[str], str]]:
    """Returns (questions with one meaning, their answer) of the file of questions.

    An entry's `is` or `are` names its subject, which makes some questions by rule; `questions` has others, which come
    after them. `about` is `rust`, or `cleave` with language models and the demo itself.
    """
    entries = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        subject = entry.get("is") or entry.get("are")
        verb = "is" if "is" in entry else "are"
        forms = [form for form in FORMS if subject and (entry["about"] == "rust" or "Rust" not in form)]
        questions = [form.format(verb=verb, x=subject) for form in forms] + entry["questions"]
        once = dict.fromkeys(question[0].upper() + question[1:] for question in questions)
        entries.append((list(once), entry["answer"]))
    return entries


def typed(question: str, rng: random.Random) -> str:
    """Returns the question as it is, or as people type it: small letters, no mark at the end."""
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    return question


def handwritten_chats(entries: list[tuple[str, str]], rounds: int, rng: random.Random) -> list[str]:
    """Returns each pair as often as there are rounds: alone, after a system message, or after another pair."""
    chats = []
    for _ in range(rounds):
        for question, answer in entries:
            chat = turn("user", typed(question, rng)) + turn("assistant", answer)
            if rng.random() < 0.15:
                first, first_answer = rng.choice(entries)
                chat = turn("user", typed(first, rng)) + turn("assistant", first_answer) + chat
            if rng.random() < 0.2:
                chat = turn("system", rng.choice(SYSTEMS)) + chat
            chats.append(chat)
    return chats


def split_questions(entries: list[tuple[list[str], str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns pairs to learn, and held-out ones: the last question of every fourth entry that has three or more."""
    learned, held = [], []
    for index, (questions, answer) in enumerate(entries):
        kept = questions
        if index % 4 == 3 and len(questions) > 2:
            kept = questions[:-1]
            held.append((questions[-1], answer))
        learned += [(question, answer) for question in kept]
    return learned, held
