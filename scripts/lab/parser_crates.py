"""Cleave's readers beside those of other crates, on the outputs of Cleave's own tests.

Owns: the project outside the workspace that has these crates, its cases, and their divisions. Never: keeps a text of
theirs. `smg` is reasoning-parser and then tool-parser, `dynamo` is dynamo-parsers; each reads an output whole, and as a
stream in each division. parser_suites.py runs it.
"""

import collections
import json
import os
import pathlib
import random
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(__file__).with_suffix(".rs")
CRATES = {"tool-parser": "1.10.0", "reasoning-parser": "1.10.0", "dynamo-parsers": "11.0.1"}
# Their interfaces need these.
BESIDE = {"openai-protocol": "1", "dynamo-protocols": "10", "futures": "0.3", "serde_json": "1", "tokio": "1"}
# Divisions of each output besides that into characters.
RANDOM_DIVISIONS, CUTS_MAX = 20, 8

# Names of their parsers by ours; a format that is not here has none. dynamo-parsers needs a download for `openai`.
CALLS = {
    "smg": {
        "hermes": "qwen", "llama3_json": "llama", "llama4_json": "llama", "pythonic": "pythonic", "llama4_pythonic": "pythonic",
        "deepseek_v3": "deepseek", "deepseek_v31": "deepseek31", "deepseek_v32": "deepseek32", "deepseek_v4": "deepseek_v4",
        "deepseek_v41": "deepseek_v41", "mistral": "mistral", "cohere_command3": "cohere", "step3": "step3", "kimi_k2": "kimik2", "gemma4": "gemma4",
        "qwen3_coder": "qwen_coder", "qwen3_xml": "qwen_xml", "minimax_m2": "minimax_m2", "glm45": "glm45_moe",
        "glm47": "glm47_moe",
    },
    "dynamo": {
        "hermes": "hermes", "llama3_json": "llama3_json", "llama4_json": "llama3_json", "pythonic": "pythonic",
        "llama4_pythonic": "pythonic", "deepseek_v3": "deepseek_v3", "deepseek_v31": "deepseek_v3_1",
        "deepseek_v32": "deepseek_v3_2", "deepseek_v4": "deepseek_v4", "mistral": "mistral", "nemotron_json": "nemotron_deci",
        "kimi_k2": "kimi_k2", "gemma4": "gemma4", "qwen3_coder": "qwen3_coder", "qwen3_xml": "qwen3_coder",
        "minimax_m2": "minimax_m2", "glm47": "glm47", "jamba": "jamba",
    },
}
REASONING = {
    "smg": {
        "qwen3": "qwen3", "gemma4": "gemma4", "cohere_command3": "cohere_cmd", "deepseek_r1": "deepseek_r1",
        "deepseek_v41": "deepseek_v41",
        "deepseek_v3": "deepseek_v31", "deepseek_v4": "deepseek_v4", "glm45": "glm45", "kimi_k2": "kimi_k25",
        "minimax_m2": "minimax", "nemotron_v3": "nano_v3", "step3": "step3",
    },
    "dynamo": {
        "qwen3": "qwen3", "gemma4": "gemma4", "mistral": "mistral", "deepseek_r1": "deepseek_r1", "deepseek_v3": "deepseek_v3",
        "deepseek_v4": "deepseek_v4", "glm45": "glm45", "kimi_k2": "kimi_k25", "minimax_m2": "minimax_m2",
        "nemotron_v3": "nemotron_v3", "step3": "step3",
    },
}
OPENINGS = ("<think>", "[THINK]", "<|channel>thought", "<|START_THINKING|>", "<seed:think>")


def build(folder):
    """Builds the project; returns its program."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    lines = ["[package]", 'name = "parser-crates"', 'version = "0.0.0"', 'edition = "2024"', "[workspace]", "[dependencies]"]
    lines += [f'{crate} = "={version}"' for crate, version in CRATES.items()]
    lines += [f'{crate} = "{version}"' for crate, version in BESIDE.items()]
    (folder / "Cargo.toml").write_text("\n".join(lines) + "\n")
    (folder / "src" / "main.rs").write_text(PROGRAM.read_text())
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    command = ["cargo", "build", "--quiet", "--config", "profile.dev.debug=0"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder / "target" / "debug" / "parser-crates"


def fixtures():
    """The outputs of Cleave's tests, each once."""
    command = ["cargo", "test", "--quiet", "-p", "cleave-text", "--lib", "--", "--show-output", "output::tests",
               "output::division_tests::every_division_in", "output::scenario_tests"]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in said.splitlines():
        if line.startswith("fixture "):
            case = json.loads(line.removeprefix("fixture "))
            key = tuple(case[name] for name in ("reasoning", "calls", "prompt", "output"))
            found.setdefault(key, case)
    return list(found.values())


def divisions(text):
    """The whole text, its characters, and random divisions of it."""
    chance = random.Random(text)
    made = [[text], list(text) or [""]]
    for _ in range(RANDOM_DIVISIONS):
        count = min(len(text), chance.randint(1, CUTS_MAX))
        cuts = sorted(chance.sample(range(1, len(text) + 1), count))
        made.append([text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])])
    return made


def value(arguments):
    """The value of a call's arguments, or their text if they are no JSON."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments.strip()


def compared(parts):
    """Parts in the form in which they are compared: without whitespace around texts, arguments by their value."""
    if isinstance(parts, str):
        return parts
    reasoning, text, calls = parts
    return reasoning.strip(), text.strip(), [(name, value(arguments)) for name, arguments, *_ in calls]


def exact(parts):
    if isinstance(parts, str):
        return parts
    reasoning, text, calls = parts
    return reasoning, text, [(name, value(arguments)) for name, arguments, *_ in calls]


# Marks of any format.
MARK = re.compile(r"</?[^<>\s]{1,40}>|</?[|｜][^<>]{1,40}>|\[/?[A-Z_]+\]")


def bare(text):
    return re.sub(r"\s", "", MARK.sub("", text))


def why(case, ours, theirs):
    """The class of a difference, as docs/benchmarks/parser-suites.md has them."""
    if isinstance(theirs, str):
        return "p"
    (reasoning, text, calls), (their_reasoning, their_text, their_calls) = compared(ours), compared(theirs)
    named = {tool["name"] for tool in case["tools"]}
    if any(isinstance(arguments, str) for _, arguments in calls):
        return "b"
    if len(their_calls) > len(calls) or any(name not in named for name, _ in their_calls):
        return "u"
    if reasoning != their_reasoning:
        return "r"
    if calls != their_calls:
        return "v" if len(calls) == len(their_calls) else "l"
    return "c" if bare(text) == bare(their_text) else "a"


class Crates:
    """The program with the other projects' readers."""

    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self, project, case, cut):
        asked = {
            "project": project, "tools": case["tools"], "divisions": cut,
            "reasoning": REASONING[project].get(case["reasoning"], ""), "calls": CALLS[project].get(case["calls"], ""),
            "is_open": case["prompt"].strip().endswith(OPENINGS),
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def has(project, case):
    """Whether a project has the formats of a case."""
    calls, reasoning = case["calls"], case["reasoning"]
    return (calls == "none" or calls in CALLS[project]) and (reasoning == "none" or reasoning in REASONING[project])


def compare(folder, read, verbose):
    """Compares all; returns rows of (project, format, counts). `read` gives Cleave's parts of a case's pieces."""
    crates = Crates(build(folder / "crates-project"))
    rows = collections.defaultdict(collections.Counter)
    for case in fixtures():
        cut = divisions(case["output"])
        ours = [read(case, pieces) for pieces in cut]
        for project in CALLS:
            if not has(project, case):
                continue
            named = case["calls"] if case["calls"] != "none" else f"reasoning {case['reasoning']}"
            row = rows[project, named]
            theirs = crates.read(project, case, cut)
            if exact(ours[0]) == exact(theirs["whole"]):
                outcome = "equal"
            elif compared(ours[0]) == compared(theirs["whole"]):
                outcome = "whitespace"
            else:
                outcome = "different"
                letter = why(case, ours[0], theirs["whole"])
                row[f"why {letter}"] += 1
                if verbose:
                    said = [letter, project, named, case["test"], case["output"], ours[0], theirs["whole"]]
                    print(json.dumps(said, ensure_ascii=False))
            row["cases"] += 1
            row[outcome] += 1
            row["divisions"] += len(cut) - 1
            row["theirs"] += sum(compared(stream) != compared(theirs["whole"]) for stream in theirs["streams"][1:])
            row["ours"] += sum(parts != ours[0] for parts in ours[1:])
    return rows


def table(rows):
    """Lines of the table, for each project one format a row."""
    yield "| readers and format | cases | equal | but for whitespace | different | why | divisions | differ there | differ here |"
    yield "|---|---:|---:|---:|---:|---|---:|---:|---:|"
    sums = collections.defaultdict(collections.Counter)
    for (project, _), row in rows.items():
        sums[project, "in all"].update(row)
    for (project, name), row in [*sorted(rows.items()), *sorted(sums.items())]:
        letters = ", ".join(f"{count} {key[-1]}" for key, count in sorted(row.items()) if key.startswith("why "))
        counts = [str(row[key]) for key in ("cases", "equal", "whitespace", "different", "divisions", "theirs", "ours")]
        share = f" ({100 * row['theirs'] / row['divisions']:.0f} %)" if name == "in all" else ""
        yield f"| {project} {name} | " + " | ".join([*counts[:4], letters, counts[4], counts[5] + share, counts[6]]) + " |"
