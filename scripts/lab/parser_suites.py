#!/usr/bin/env python3
"""Compares the readers of tool calls and reasoning with suites that other projects wrote.

usage: parser_suites.py [--suites FOLDER] [--only suites|crates] [--verbose]

vLLM's tests of its parsers (PyPI's source of vllm) run unchanged, by pytest, on Cleave's readers: this file is also the
pytest plugin that stands in for the package `vllm`. The tests of the Rust crates tool-parser, reasoning-parser and
dynamo-parsers are read as text, and their assertions about an output that is read whole are checked. Each output that a
test reads is read a second time character by character and a third time in random pieces. Then the same crates read the
outputs of Cleave's own tests (parser_crates.py), whole and in pieces. The sources, pytest and a project with the crates
come into --suites, by default a temporary folder; nothing of them is kept. Prints the rows of
docs/benchmarks/parser-suites.md, with --verbose each difference too. Exit status: 1 if a division of an output changes
its parts.
"""

import argparse
import ast
import collections
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest.mock
import urllib.request

import parser_crates

ROOT = pathlib.Path(__file__).resolve().parents[2]
VLLM = "0.33.0"

# Files of vLLM's tests by the format that they test.
CALL_FILES = {
    "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31", "deepseek_v32": "deepseekv32", "deepseek_v4": "deepseekv4",
    "gemma4": "gemma4", "glm45": "glm4_moe", "glm47": "glm47_moe", "hermes": "hermes", "kimi_k2": "kimi_k2",
    "llama3_json": "llama3_json", "llama4_pythonic": "llama4_pythonic", "minimax_m2": "minimax_m2", "pythonic": "pythonic",
    "qwen3_coder": "qwen3coder", "step3": "step3", "granite": "granite", "hunyuan_a13b": "hunyuan_a13b", "longcat": "longcat",
}
REASONING_FILES = {
    "deepseek_r1": "deepseekr1", "deepseek_v3": "deepseekv3", "gemma4": "gemma4", "glm45": "glm4_moe", "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2", "nemotron_v3": "nemotron_v3", "olmo3": "olmo3", "qwen3": "qwen3", "step3": "step3",
}
# Their parsers of these formats take an output for reasoning from its first character on.
OPENED = ("deepseek_r1", "glm45", "qwen3", "minimax_m2", "kimi_k2", "nemotron_v3", "step3", "olmo3")
CLASSES = {
    "DeepSeekV3ToolParser": "deepseek_v3", "DeepSeekV31ToolParser": "deepseek_v31", "DeepSeekV32EngineToolParser": "deepseek_v32",
    "DeepSeekV4EngineToolParser": "deepseek_v4", "Gemma4EngineToolParser": "gemma4", "Glm47MoeModelToolParser": "glm47",
    "Hermes2ProToolParser": "hermes", "KimiK2ToolParser": "kimi_k2", "Llama3JsonToolParser": "llama3_json",
    "MinimaxM2ToolParser": "minimax_m2", "MinimaxM2EngineToolParser": "minimax_m2", "Qwen3EngineToolParser": "qwen3_coder",
    "Qwen3CoderToolParser": "qwen3_coder", "Qwen3XMLToolParser": "qwen3_xml",
}
REASONING_CLASSES = {
    "DeepSeekR1ReasoningParser": "deepseek_r1", "DeepSeekV3ReasoningParser": "deepseek_v3", "KimiK2ReasoningParser": "kimi_k2",
    "NemotronV3ParserReasoningAdapter": "nemotron_v3",
}

# Marks of Cohere's answers: special tokens, which Cleave drops before it reads.
COHERE = "cohere_command3"
COHERE_ANSWER = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")

CONSTANTS = {"TOOL_CALL_START": "<|tool_call>", "TOOL_CALL_END": "<tool_call|>"}


class Reader:
    """The example `output_parts` of crates/text, and the outputs that it read."""

    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cases = {}
        self.divided = []

    def read(self, case, pieces):
        """The parts of an output for each piece and for the end."""
        self.process.stdin.write(json.dumps(case | {"pieces": pieces}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def parts(self, case, text):
        """The joined parts of an output; whole, in characters and in random pieces."""
        if COHERE in (case["calls"], case["reasoning"]):
            text = COHERE_ANSWER.sub("", text)
        whole = joined(self.read(case, [text]))
        key = json.dumps([case, text], sort_keys=True)
        if key not in self.cases:
            self.cases[key] = whole
            chance = random.Random(text)
            cuts = sorted(chance.sample(range(len(text) + 1), min(4, len(text))))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
            if joined(self.read(case, list(text))) != whole or joined(self.read(case, pieces)) != whole:
                self.divided.append(text)
        return whole


def joined(lists):
    """Parts of an output as (reasoning, text, calls), a call being [name, arguments, id]."""
    reasoning, text, calls = "", "", []
    for part in (part for parts in lists for part in parts):
        reasoning += part.get("reasoning", "")
        text += part.get("text", "")
        if "begin" in part:
            calls.append([part["begin"], "", part["id"]])
        if "arguments" in part:
            calls[-1][1] += part["arguments"]
    return reasoning, text, calls


# The stand-in for vLLM, as far as its tests of parsers use it.


class Record(types.SimpleNamespace):
    """An object of any fields; those that were not given are None."""

    def __init__(self, *_, **fields):
        for name in ("function", "tool_choice"):
            if isinstance(fields.get(name), dict):
                fields[name] = Record(**fields[name])
        if isinstance(fields.get("tools"), list):
            fields["tools"] = [Record(**tool) if isinstance(tool, dict) else tool for tool in fields["tools"]]
        super().__init__(**fields)

    def __eq__(self, other):
        given = [{name: value for name, value in vars(one).items() if value is not None} for one in (self, other)]
        return given[0] == given[1]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Text(str):
    """An output's text, equal to one that differs in the whitespace around it; that is noted."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        if other is None:
            return not self
        if not isinstance(other, str) or str.__eq__(self, other):
            return str.__eq__(self, other)
        Shim.is_stripped |= self.strip() == other.strip()
        return self.strip() == other.strip()

    def __ne__(self, other):
        return not self == other

    def __add__(self, other):
        return Text(str(self) + str(other))

    def __radd__(self, other):
        return Text(str(other) + str(self))


class FunctionCall(Record):
    def __eq__(self, other):
        """JSON texts are compared by their values."""
        return self.name == other.name and json.loads(self.arguments) == json.loads(other.arguments)


class ExtractedToolCallInformation(Record):
    pass


class ToolCall(Record):
    def __init__(self, **fields):
        super().__init__(**({"type": "function"} | fields))


class DeltaMessage(Record):
    def __init__(self, **fields):
        super().__init__(**({"content": None, "reasoning": None, "tool_calls": []} | fields))


class Numbers(dict):
    """A vocabulary that takes up each token for which it is asked."""

    def __missing__(self, token):
        self[token] = len(Words.texts)
        Words.texts.append(token)
        return self[token]


class Words:
    """A tokenizer whose tokens are marks, words and other characters; each text has its own number."""

    PATTERN = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]+\]|\s?\w+|.", re.DOTALL)
    texts, numbers = [], Numbers()

    def tokenize(self, text):
        return self.PATTERN.findall(text)

    def encode(self, text, **_):
        return [self.numbers[token] for token in self.tokenize(text)]

    def decode(self, numbers, **_):
        numbers = [numbers] if isinstance(numbers, int) else numbers
        if any(number >= len(self.texts) for number in numbers):
            raise TypeError("a number of the model's own vocabulary")
        return "".join(self.texts[number] for number in numbers)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def convert_ids_to_tokens(self, numbers, **_):
        return [self.texts[number] for number in numbers]

    def convert_tokens_to_ids(self, tokens):
        return [self.encode(token)[0] for token in tokens] if isinstance(tokens, list) else self.encode(tokens)[0]

    def get_vocab(self):
        return self.numbers

    def __len__(self):
        return len(self.texts)


def field(thing, name):
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def tools_of(tools):
    """Names and schemas of a request's tools, in whichever of OpenAI's shapes."""
    found = []
    for tool in tools or []:
        function = field(tool, "function") or tool
        if isinstance(field(function, "name"), str):
            found.append({"name": field(function, "name"), "parameters": field(function, "parameters") or {}})
    return found


class Shim:
    """A parser of vLLM's interface that reads with Cleave."""

    reader = None
    names = []
    calls = reasoning = "none"
    used = is_stripped = False

    def __init__(self, tokenizer=None, tools=None, *_, **options):
        self.model_tokenizer = tokenizer if isinstance(tokenizer, Words) else Words()
        self.vocab = self.model_tokenizer.get_vocab()
        self.tools = tools_of(tools if isinstance(tools, list) else None)
        self.options = options.get("chat_template_kwargs") or {}
        self.pieces, self.case = [], None

    def case_of(self, request):
        """Returns the case that outputs are read with. Cleave reads calls of a request's tools only, and vLLM's tests
        often give none: each word of the test's source is the name of one."""
        tools = tools_of(getattr(request, "tools", None)) or self.tools
        given = {tool["name"] for tool in tools}
        prompt = ""
        options = self.options | (getattr(request, "chat_template_kwargs", None) or {})
        thinking = options.get("thinking", options.get("enable_thinking"))
        if thinking or (thinking is None and self.reasoning in OPENED):
            prompt = "<think>"
        elif thinking is False:
            prompt = "</think>"
        tools += [{"name": name, "parameters": {}} for name in self.names if name not in given]
        return {"calls": self.calls, "reasoning": self.reasoning, "prompt": prompt, "tools": tools}

    def extract_tool_calls(self, model_output, request=None, **_):
        Shim.used = True
        _, text, calls = self.reader.parts(self.case_of(request), model_output)
        made = [ToolCall(id=id or f"call_{index}", function=FunctionCall(name=name, arguments=arguments))
                for index, (name, arguments, id) in enumerate(calls)]
        return ExtractedToolCallInformation(tools_called=bool(made), tool_calls=made, content=Text(text) if text else None)

    def extract_reasoning(self, model_output, request=None, **_):
        Shim.used = True
        reasoning, text, _ = self.reader.parts(self.case_of(request), model_output)
        return Text(reasoning) if reasoning else None, Text(text) if text else None

    def extract_tool_calls_streaming(self, previous_text="", current_text="", delta_text="", *_, request=None, **__):
        if len(_) == 4:
            request = _[3]
        Shim.used = True
        before = current_text[: len(current_text) - len(delta_text)]
        if "".join(self.pieces) != before:
            self.pieces = [before] if before else []
        self.pieces.append(delta_text)
        self.request = request
        lists = self.reader.read(self.case_of(request), self.pieces)
        return self.delta(lists[:-2], lists[-2])

    def parse(self, model_output, request=None, **_):
        """Reads an output as Cohere's parser does, which has all parts."""
        Shim.used = True
        reasoning, text, calls = self.reader.parts(self.case_of(request), model_output)
        made = [FunctionCall(name=name, arguments=arguments, id=id) for name, arguments, id in calls]
        return Text(reasoning) if reasoning else None, Text(text) if text else None, made

    def parse_delta(self, text, numbers, request, finished=False):
        Shim.used = True
        self.pieces.append(COHERE_ANSWER.sub("", text))
        lists = self.reader.read(self.case_of(request), self.pieces)
        return self.delta(lists[:-2], lists[-2] + (lists[-1] if finished else []))

    def adjust_request(self, request):
        pass

    def is_reasoning_end(self, numbers):
        """Whether text that would follow is no reasoning."""
        text = self.model_tokenizer.decode(numbers) + "\0"
        return "\0" not in joined(self.reader.read(self.case_of(None), [text]))[0]

    def extract_content_ids(self, numbers):
        text = "".join(numbers) if isinstance(numbers[0], str) else self.model_tokenizer.decode(numbers)
        return self.model_tokenizer.encode(joined(self.reader.read(self.case_of(None), [text]))[1])

    extract_reasoning_streaming = extract_tool_calls_streaming

    def finish(self):
        """Returns the parts that the end of the output brings; vLLM's tests do not tell it."""
        if not self.pieces:
            return None
        lists = self.reader.read(self.case_of(self.request), self.pieces)
        self.pieces = []
        return self.delta(lists[:-1], lists[-1])

    @staticmethod
    def delta(before, parts):
        reasoning, text, calls = "", "", {}
        index = sum("begin" in part for old in before for part in old) - 1
        for part in parts:
            reasoning += part.get("reasoning", "")
            text += part.get("text", "")
            if "begin" in part:
                index += 1
                calls[index] = Record(index=index, id=part["id"] or f"call_{index}", type="function",
                                      function=FunctionCall(name=part["begin"], arguments=""))
            if "arguments" in part:
                empty = Record(index=index, function=FunctionCall(arguments=""))
                calls.setdefault(index, empty).function.arguments += part["arguments"]
        if not (reasoning or text or calls):
            return None
        reasoning, text = (Text(part) if part else None for part in (reasoning, text))
        return DeltaMessage(reasoning=reasoning, content=text, tool_calls=list(calls.values()))


def shim(calls="none", reasoning="none"):
    return type("ToolParser", (Shim,), {"calls": calls, "reasoning": reasoning})


class ToolParserManager:
    get_tool_parser = staticmethod(lambda name: shim(calls=name))


class ParserManager:
    get_parser = staticmethod(lambda *_, **__: shim(calls=COHERE, reasoning=COHERE))


class ReasoningParserManager:
    get_reasoning_parser = staticmethod(lambda name: shim(reasoning=name))


class StandIn(types.ModuleType):
    """A module of which each name is a stand-in."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        known = (FunctionCall, ToolCall, DeltaMessage, ExtractedToolCallInformation, ToolParserManager, ReasoningParserManager,
                 ParserManager)
        if name in CLASSES:
            return shim(calls=CLASSES[name])
        if name in REASONING_CLASSES:
            return shim(reasoning=REASONING_CLASSES[name])
        if name == "get_tokenizer":
            return lambda *_, **__: Words()
        if name == "detokenize_incrementally":
            return lambda tokenizer, all_input_ids, **_: ([], tokenizer.decode(all_input_ids[-1]), 0, 0)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "AutoTokenizer":
            return types.SimpleNamespace(from_pretrained=lambda *_, **__: Words())
        if name in ("ToolParser", "ReasoningParser"):
            return Shim
        return {kind.__name__: kind for kind in known}.get(name) or type(name, (Record,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("vllm", "transformers", "openai", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def pytest_load_initial_conftests():
    sys.meta_path.insert(0, Finder())


def pytest_configure():
    Shim.reader = Reader(os.environ["OUTPUT_PARTS"])
    for suite, run in (("tool_parsers", "run_tool_extraction_streaming"), ("reasoning", "run_reasoning_extraction_streaming")):
        module = importlib.import_module(f"tests.{suite}.utils")

        def finished(parser, *given, inner=getattr(module, run), **options):
            options.pop("assert_one_tool_per_delta", None)
            more = {"assert_one_tool_per_delta": False} if inner.__name__ == "run_tool_extraction_streaming" else {}
            parser.pieces = []
            made = inner(parser, *given, **options, **more)
            delta = parser.finish()
            if delta is not None:
                made.append_delta(delta)
            return made

        setattr(module, run, finished)


def pytest_runtest_setup(item):
    Shim.used = Shim.is_stripped = False
    source = pathlib.Path(item.fspath).read_text()
    words = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    Shim.names = sorted({word for text in words for word in re.findall(r"[\w.\-]{1,64}", text) if not word[0].isdigit()})


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome == "failed":
        text = str(report.longrepr or "")
        outcome = report.outcome if Shim.used else "internal"
        if outcome == "passed" and Shim.is_stripped:
            outcome = "whitespace"
        # An empty text is no text here; vLLM's parsers differ in that among themselves.
        if outcome == "failed" and re.findall(r"^E\s+(\S.*)", text, re.MULTILINE)[:1] == ["AssertionError: assert None == ''"]:
            outcome = "whitespace"
        # A test that asks for more of vLLM than the stand-in has is none of the reader.
        if outcome == "failed" and re.search(r"^E\s+(AttributeError|TypeError)", text, re.MULTILINE):
            outcome = "internal"
        entry = {"test": report.nodeid, "outcome": outcome, "text": text[-3000:]}
        with open(os.environ["PARSER_RESULTS"], "a") as results:
            results.write(json.dumps(entry) + "\n")


def pytest_sessionfinish():
    with open(os.environ["PARSER_RESULTS"], "a") as results:
        results.write(json.dumps({"outputs": len(Shim.reader.cases), "divided": Shim.reader.divided}) + "\n")
    Shim.reader.process.stdin.close()


# The tests of the Rust crates, read as text.

RUST_FILES = {
    "tool_parser_deepseek": "deepseek_v3", "tool_parser_deepseek31": "deepseek_v31", "tool_parser_gemma4": "gemma4",
    "tool_parser_glm4_moe": "glm45", "tool_parser_glm47_moe": "glm47", "tool_parser_kimik2": "kimi_k2",
    "tool_parser_llama": "llama3_json", "tool_parser_minimax_m2": "minimax_m2", "tool_parser_mistral": "mistral",
    "tool_parser_pythonic": "pythonic", "tool_parser_cohere": COHERE, "tool_parser_deepseek_v41": "deepseek_v41", "tool_parser_step3": "step3", "tool_parser_qwen": "hermes", "tool_parser_qwen_xml": "qwen3_coder",
}
LITERAL = r'(?:r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)|"(?P<plain>(?:[^"\\]|\\.)*)")'


def literal(found):
    if found["raw"] is not None:
        return found["raw"]
    # A backslash at the end of a line joins it with the next one's first character.
    text = re.sub(r"\\\n\s*", "", found["plain"])
    return json.loads(re.sub(r"[\n\t]", lambda c: {"\n": "\\n", "\t": "\\t"}[c[0]], '"' + text.replace("\\'", "'") + '"'))


def expected_value(text):
    """The value of a literal on the right of an assertion; an exception if it is none."""
    text = text.strip().rstrip(",").strip()
    text = re.sub(r"^Some\((.*?)(?:\.to_string\(\)|\.into\(\))?\)$", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"^(?:serde_json::)?json!\((.*)\)$", r"\1", text, flags=re.DOTALL)
    if text.endswith("Value::Null"):
        return None
    found = re.fullmatch(LITERAL, text, re.DOTALL)
    return literal(found) if found else json.loads(text)


def rust_cases(source, call=r"parse_complete\((?P<format>)&?(?P<text>\w+)\)"):
    """Yields each output that a test reads whole: name, the format's name if the call has it, text, and the assertions
    up to the next one."""
    for test in re.split(r"#\[(?:(?:tokio::)?test|rstest)\]", source)[1:]:
        name = re.search(r"fn (\w+)", test)[1]
        texts = list(re.finditer(r"let (\w+)(?:: &str)? =\s*" + LITERAL + ";", test, re.DOTALL))
        reads = list(re.finditer(call, test))
        for read, following in zip(reads, [*reads[1:], None]):
            given = [found for found in texts if found[1] == read["text"] and found.start() < read.start()]
            if given:
                yield name, read["format"] or read.groupdict().get("kind"), literal(given[-1]), test[read.end() : following.start() if following else len(test)]


def rust_differences(asserted, text, calls, given):
    """Differences from what a test asserts, and how many of its assertions were understood."""
    differences, count = [], 0
    # Comments behind assertions, and assertions that hold under a condition.
    asserted = re.sub(r";[ \t]*//[^\n]*", ";", asserted)
    asserted = re.sub(r"if \w+\.is_empty\(\) \{.*?\n    \}", "", asserted, flags=re.DOTALL)
    variables = {}
    binding = r"let (?:\((\w+), (\w+)\)|(\w+)(?:: (?:serde_json::)?Value)?)\s*=\s*[^;\[]*\w+\[(\d+)\][^;]*;"
    for found in re.finditer(binding + r"|assert_eq!\(\s*([^,]+?),\s*((?:[^;]|;(?!\n))*?)\s*\);", asserted, re.DOTALL):
        name, pair, single, number, left, right = found.groups()
        if left is None:
            variables |= {name: (int(number), 0), pair or single: (int(number), 1)}
            continue
        right = re.split(r',\s*"(?:[^"\\]|\\.)*"(?:,[^"]*)?$', right)[0] if right.count('"') > 2 else right
        index = re.match(r"\w+\[(\d+)\]\.function\.name", left)
        keys = re.match(r"(\w+)((?:\[[^\]]+\])*)$", left)
        try:
            want = given if right.strip() in ("input", "text") else expected_value(right)
            if re.match(r"(tools|tool_calls|calls|result)\.len\(\)$", left):
                got = len(calls)
            elif index:
                got = calls[int(index[1])][0]
            elif re.fullmatch(r"_?(normal|normal_text|content)", left):
                got, want = text, want or ""
            elif keys and keys[1] in variables:
                number, part = variables[keys[1]]
                got = json.loads(calls[number][1]) if part else calls[number][0]
                for key in re.findall(r"\[([^\]]+)\]", keys[2]):
                    got = got[json.loads(key)]
            else:
                continue
        except json.JSONDecodeError:
            continue
        except (IndexError, KeyError, TypeError) as error:
            got = repr(error)
        count += 1
        if got != want:
            differences.append((got, want))
    return differences, count


DYNAMO_CALL = (r"(?:detect_and_parse_tool_call\(\s*&?(?=\w+,\s*Some\(\"(?P<format>\w+)\"\))|try_tool_call_parse_(?P<kind>\w+)\(\s*&?)"
               r"(?P<text>\w+)")
DYNAMO_NAMES = {"nemotron_deci": "nemotron_json", "dsml": "deepseek_v32", "deepseek_v3_2": "deepseek_v32", "deepseek_v3_1": "deepseek_v31"}
REASONING_TYPES = {
    "DeepSeekR1Parser": ("deepseek_r1", "<think>"), "Glm45Parser": ("glm45", ""), "KimiThinkingParser": ("kimi_k2", "<think>"),
    "NanoV3Parser": ("nemotron_v3", ""), "Qwen3Parser": ("qwen3", ""), "QwenThinkingParser": ("qwen3", "<think>"),
    "Step3Parser": ("step3", "<think>"), "Gemma4Parser": ("gemma4", ""), "CohereCmdParser": (COHERE, ""),
}


def check_reasoning(folder, reader, verbose):
    """Rows of the crate reasoning-parser's tests of outputs that are read whole."""
    sources = [path.read_text() for path in sorted(folder.rglob("*.rs"))]
    outcomes = collections.defaultdict(collections.Counter)
    for test in (test for source in sources for test in re.split(r"#\[test\]", source)[1:]):
        made = re.search(r"(\w+)::new\(\)", test)
        if not made or made[1] not in REASONING_TYPES:
            continue
        name, prompt = REASONING_TYPES[made[1]]
        reads = r"let (?:mut )?(\w+) = parser\s*\.detect_and_parse_reasoning\(\s*" + LITERAL + r",?\s*\)"
        for read in re.finditer(reads, test, re.DOTALL):
            wanted = {}
            for field_name in ("normal", "reasoning"):
                pattern = r"assert_eq!\(\s*" + read[1] + rf"\.{field_name}_text,\s*" + LITERAL
                found = re.search(pattern, test[read.end() :], re.DOTALL)
                if found:
                    wanted[field_name] = literal(found)
            reasoning, text, _ = reader.parts({"calls": "none", "reasoning": name, "prompt": prompt, "tools": []}, literal(read))
            got = {"normal": text, "reasoning": reasoning}
            pairs = [(got[key], want) for key, want in wanted.items() if got[key] != want]
            real = [pair for pair in pairs if pair[0].strip() != pair[1].strip()]
            outcomes[name]["failed" if real else "whitespace" if pairs else "passed" if wanted else "internal"] += 1
            if verbose and real:
                print(f"  {made[1]} {literal(read)!r}: " + "; ".join(f"{side!r} for {want!r}" for side, want in real))
    return [(f"reasoning-parser {name}", counts) for name, counts in sorted(outcomes.items())]


def check_case(reader, calls, source, given, asserted):
    """The outcome of one case, and the differences that are not of whitespace."""
    words = set(re.findall(r"[\w.\-]{1,64}", source))
    names = sorted(words | {word.rsplit(".", 1)[-1] for word in words} - {""})
    tools = [{"name": name, "parameters": {}} for name in names if not name[0].isdigit()]
    case = {"calls": calls, "reasoning": "none", "prompt": "", "tools": tools}
    _, text, made = reader.parts(case, given)
    differences, count = rust_differences(asserted, text, made, given)
    real = [pair for pair in differences if str(pair[0]).strip() != str(pair[1]).strip()]
    outcome = "internal" if not count else "passed" if not differences else "failed" if real else "whitespace"
    return outcome, "; ".join(f"{got!r} for {want!r}" for got, want in real)


def check_rust(folder, reader, verbose):
    """Rows of the tests of tool-parser, then of dynamo-parsers."""
    cases = []
    for file, calls in RUST_FILES.items():
        source = (folder / "tool-parser" / "tests" / f"{file}.rs").read_text()
        cases += [("tool-parser", calls, source, name, given, asserted) for name, _, given, asserted in rust_cases(source)]
    for file in sorted((folder / "dynamo-parsers" / "src" / "tool_calling").rglob("*.rs")):
        source = file.read_text()
        for name, calls, given, asserted in rust_cases(source, DYNAMO_CALL):
            # Its one parser of DeepSeek's tags reads the marks of both versions.
            calls = "deepseek_v4" if calls == "dsml" and "tool_calls>" in given else DYNAMO_NAMES.get(calls, calls)
            calls = "nemotron_json" if calls == "json" and "<TOOLCALL>" in given else calls
            if calls in CALL_FILES or calls in ("mistral", "nemotron_json"):
                cases.append(("dynamo-parsers", calls, source, name, given, asserted))
    outcomes = collections.defaultdict(collections.Counter)
    for crate, calls, source, name, given, asserted in cases:
        outcome, reason = check_case(reader, calls, source, given, asserted)
        outcomes[f"{crate} {calls}"][outcome] += 1
        if verbose and outcome == "failed":
            print(f"  {crate} {calls} {name}: {reason[:300]}")
    return outcomes.items()


def check_vllm(folder, program, verbose):
    """Rows of vLLM's tests, and the outputs whose division mattered."""
    tests = [f"tests/tool_parsers/test_{file}_tool_parser.py" for file in CALL_FILES.values()]
    tests += [f"tests/reasoning/test_{file}_reasoning_parser.py" for file in REASONING_FILES.values()]
    tests += [f"tests/parser/cohere/test_{file}.py" for file in ("tool_calls", "reasoning")]
    results = folder / "results"
    results.unlink(missing_ok=True)
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), str(folder), str(folder.parent / "packages")])
    environment = os.environ | {"OUTPUT_PARTS": str(program), "PARSER_RESULTS": str(results), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "parser_suites", "-c", os.devnull, "--rootdir", ".", "--runxfail", *tests]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    rows = []
    places = [(f"tool {name}", f"/test_{file}_tool_parser.py") for name, file in CALL_FILES.items()]
    places += [(f"reasoning {name}", f"/test_{file}_reasoning_parser.py") for name, file in REASONING_FILES.items()]
    for name, place in [*places, (f"tool and reasoning {COHERE}", "/parser/cohere/")]:
        mine = [entry for entry in entries if place in entry.get("test", "")]
        rows.append((f"vLLM {name}", collections.Counter(entry["outcome"] for entry in mine)))
        for entry in mine if verbose else []:
            if entry["outcome"] == "failed":
                reason = [line[1:].strip() for line in entry["text"].splitlines() if line.startswith("E ")]
                print(f"  {entry['test'].split('/')[-1]}: " + " | ".join(reason)[:300])
    return rows, entries[-1]


def fetch_vllm(folder):
    """Downloads vLLM's tests, if they are not there."""
    if (folder / "vllm").is_dir():
        return
    # Not by pip: it would build the package to learn what it depends on.
    index = urllib.request.Request("https://pypi.org/simple/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(index) as answer:
        (address,) = [file["url"] for file in json.load(answer)["files"] if file["filename"] == f"vllm-{VLLM}.tar.gz"]
    archive, _ = urllib.request.urlretrieve(address)
    with tarfile.open(archive) as packed:
        tests = [member for member in packed.getmembers() if member.name.startswith(f"vllm-{VLLM}/tests/")]
        packed.extractall(folder, tests, filter="data")
    os.unlink(archive)
    (folder / f"vllm-{VLLM}").rename(folder / "vllm")
    # Only the tests that are named run, so the fixtures of vLLM's others are not needed.
    (folder / "vllm" / "tests" / "conftest.py").unlink(missing_ok=True)
    for package in ("tests", "tests/parser", "tests/parser/engine"):
        (folder / "vllm" / package / "__init__.py").touch()


def fetch(folder):
    """Downloads what is not there: vLLM's tests, the crates, and pytest."""
    if not (folder / "packages").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder / "packages", "pytest==9.0.1", "regex"]
        subprocess.run(command, check=True)
    fetch_vllm(folder)
    if not (folder / "crates").is_dir():
        with tempfile.TemporaryDirectory() as project:
            lines = ["[package]", 'name = "suites"', 'version = "0.0.0"', "[lib]", 'path = "lib.rs"', "[dependencies]"]
            lines += [f'{crate} = "={version}"' for crate, version in parser_crates.CRATES.items()]
            pathlib.Path(project, "Cargo.toml").write_text("\n".join(lines))
            pathlib.Path(project, "lib.rs").touch()
            subprocess.run(["cargo", "vendor", "--quiet", folder / "crates"], cwd=project, check=True, stdout=subprocess.DEVNULL)


def suites_table(suites, program, verbose):
    """Prints the table of the suites; returns whether a division changed an output's parts."""
    fetch(suites)
    rows, last = check_vllm(suites / "vllm", program, verbose)
    reader = Reader(program)
    rows += check_rust(suites / "crates", reader, verbose)
    rows += check_reasoning(suites / "crates" / "reasoning-parser", reader, verbose)
    print("| suite and format | cases | equal | but for whitespace | different |\n|---|---:|---:|---:|---:|")
    for name, outcomes in rows:
        counts = [outcomes[outcome] for outcome in ("passed", "whitespace", "failed")]
        if not sum(counts):
            continue
        print("| " + " | ".join([name, *map(str, [sum(counts), *counts])]) + " |")
    divided = last["divided"] + reader.divided
    print(f"{last['outputs'] + len(reader.cases)} outputs were divided; parts differed in {len(divided)}")
    for text in divided:
        print(f"  {text!r}")
    return bool(divided)


def crates_table(suites, program, verbose):
    """Prints the table of the crates on Cleave's outputs; returns whether a division changed Cleave's parts."""
    reader = Reader(program)
    rows = parser_crates.compare(suites, lambda case, pieces: joined(reader.read(case, pieces)), verbose)
    for line in parser_crates.table(rows):
        print(line)
    return any(row["ours"] for row in rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=pathlib.Path)
    parser.add_argument("--only", choices=("suites", "crates"))
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    command = ["cargo", "build", "--quiet", "-p", "cleave-text", "--example", "output_parts", "--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    executables = [json.loads(line).get("executable") for line in built.splitlines()]
    program = next(path for path in reversed(executables) if path)
    changed = False
    with tempfile.TemporaryDirectory() as temporary:
        suites = (args.suites or pathlib.Path(temporary)).resolve()
        suites.mkdir(parents=True, exist_ok=True)
        for name, table in (("suites", suites_table), ("crates", crates_table)):
            if args.only in (None, name):
                changed |= table(suites, program, args.verbose)
    sys.exit(changed)


if __name__ == "__main__":
    main()
