"""Makes chats: by rule from the headings and first paragraphs of pages, and from the questions written by hand."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from demo_pages import Section

# The order is that of their ids, which follow the byte-level pieces.
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QUESTIONS = Path(__file__).with_name("demo_questions.jsonl")
# How often a question by hand appears beside one of each form by rule.
BY_HAND_ROUNDS = 4

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


# `bare` is the subject without its article, as people type it.
FORMS = [
    "What {verb} {x}?", "What {verb} {x}?", "What {verb} {x} in Rust?", "Explain {x}.", "Explain {x} to me.",
    "Tell me about {x}.", "Can you explain {x}?", "Could you tell me what {x} {verb}?", "Please explain {x} briefly.",
    "I want to learn about {x}.", "I do not understand {x}.", "Describe {x}.", "What do you know about {x}?",
    "what {verb} {x}", "{x}", "{bare}", "{bare}?", "what is {bare}", "explain {bare}", "{bare} meaning",
]


@dataclass
class Asked:
    """An answer and its questions: those made of its subject by rule, and those written by hand."""

    by_rule: list[str]
    by_hand: list[str]
    answer: str


def handwritten() -> list[Asked]:
    """Returns the file of questions. An entry's `is` or `are` names its subject; `about` is `rust`, or `cleave` with
    language models and the demo itself."""
    entries = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        subject = entry.get("is") or entry.get("are")
        bare = re.sub("^(an?|the) ", "", subject or "")
        verb = "is" if "is" in entry else "are"
        forms = [form for form in FORMS if subject and (entry["about"] == "rust" or "Rust" not in form)]
        by_rule = [form.format(x=subject, bare=bare, verb=verb) for form in forms]
        by_rule = [question[0].upper() + question[1:] for question in by_rule]
        # A question that a rule makes too could not be held out.
        made = {question.lower() for question in by_rule}
        by_hand = [question for question in entry["questions"] if question.lower() not in made]
        entries.append(Asked(by_rule, by_hand, entry["answer"]))
    return entries


def typed(question: str, rng: random.Random) -> str:
    """Returns the question as it is, or as people type it: small letters, no mark at the end."""
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    return question


def handwritten_chats(pairs: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Returns a chat of each pair: alone, after a system message, or after another pair."""
    chats = []
    for question, answer in pairs:
        chat = turn("user", typed(question, rng)) + turn("assistant", answer)
        if rng.random() < 0.15:
            first, first_answer = rng.choice(pairs)
            chat = turn("user", typed(first, rng)) + turn("assistant", first_answer) + chat
        if rng.random() < 0.2:
            chat = turn("system", rng.choice(SYSTEMS)) + chat
        chats.append(chat)
    return chats


def split_questions(entries: list[Asked]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns pairs to learn, and held-out ones: of every fourth entry the last question by hand, if it has others."""
    learned, held = [], []
    for index, entry in enumerate(entries):
        by_hand = entry.by_hand
        if index % 4 == 3 and by_hand and len(entry.by_rule) + len(by_hand) > 2:
            by_hand = by_hand[:-1]
            held.append((entry.by_hand[-1], entry.answer))
        questions = entry.by_rule + by_hand * BY_HAND_ROUNDS
        learned += [(question, entry.answer) for question in questions]
    return learned, held
