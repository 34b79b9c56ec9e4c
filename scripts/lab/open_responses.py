#!/usr/bin/env python3
"""Checks the Responses API against the types of Open Responses, whole answers and every event of streams.

usage: open_responses.py --cleave BIN [--table]

The types come from the PyPI package openresponses-types, which is made of the specification's OpenAPI
document, into a folder under target/clients. The cases are those of Open Responses' compliance test: a text,
a stream, a system's message, a tool called whole and in a stream, an image, several turns; and besides a
schema, log-probabilities, a cut answer, and a stored response that goes on. The model is a random one, so
tools are required and outputs limited. Prints a row for each case, with --table into
docs/benchmarks/open-responses.md. Exit status: 1 if a case fails for another reason than the known ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "ci" / "clients"))

PACKAGE = "openresponses-types==2.4.0"
PAGE = ROOT / "docs" / "benchmarks" / "open-responses.md"
BEGIN, END = "<!-- cases: begin, by scripts/lab/open_responses.py --table -->", "<!-- cases: end -->"
# Differences that stay, each with a part of its message.
KNOWN = {
    "a": "response.reasoning_text.",
    "b": "parts of type \"input_image\" are not supported",
    "c": "text.format",
}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def said(role: str, content: object) -> dict:
    return {"type": "message", "role": role, "content": content}


def case(more: dict | None = None, *, items: list | None = None, status: str = "completed") -> tuple[dict, str]:
    ask = {"input": items or [said("user", "Say hello.")], "temperature": 0.8, "seed": 4, "thinking_token_budget": 4}
    return ask | (more or {}), status


FORCED = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes", "no"]}, "strict": True}}
# A random model seldom ends by itself; a schema ends a text.
ENDS = {"text": FORMAT}
CASES = {
    "text": case(ENDS),
    "text, in a stream": case(ENDS | {"stream": True}),
    "system's message": case(ENDS, items=[said("system", "Be a pirate."), said("user", "Say hello.")]),
    "tool": case(FORCED),
    "tool, in a stream": case(FORCED | {"stream": True}),
    "image": case(ENDS, items=[said("user", [{"type": "input_image", "image_url": PIXEL}])]),
    "several turns": case(ENDS, items=[said("user", "I am Alice."), said("assistant", "Hello Alice."), said("user", "Who am I?")]),
    "no form, cut": case({"max_output_tokens": 12}, status="incomplete"),
    "no form, cut, in a stream": case({"max_output_tokens": 12, "stream": True}, status="incomplete"),
    "stored and continued": case(ENDS),
    "error": case({"model": "none"}, status="404"),
}


def events_of(text: str) -> list[dict]:
    """The events of a stream; the name of each must be its type."""
    events = []
    for event in text.split("\n\n"):
        if not event or event.startswith(":"):
            continue
        name, data = event.split("\n", 1)
        found = json.loads(data.removeprefix("data: "))
        if name != f"event: {found['type']}":
            raise ValueError(f"the event {name} has the type {found['type']}")
        events.append(found)
    return events


def schemas() -> dict:
    """The types of events by their `type`, and that of a response as ``."""
    import openresponses_types.types as types  # noqa: PLC0415

    found = {"": types.ResponseResource}
    for name in dir(types):
        kind = getattr(types, name)
        if not name.endswith("StreamingEvent"):
            continue
        literal = kind.model_fields["type"].annotation
        for value in getattr(literal, "__members__", {}).values() or getattr(literal, "__args__", ()):
            found[getattr(value, "value", value)] = kind
    return found


def problems(kinds: dict, kind: str, value: dict) -> list[str]:
    import pydantic  # noqa: PLC0415

    if kind not in kinds:
        return [f"the event {kind} is not in the specification"]
    try:
        kinds[kind].model_validate(value)
    except pydantic.ValidationError as error:
        return [f"{kind or 'response'} {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return []


def post(url: str, ask: dict) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/v1/responses", json.dumps(ask).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def check(url: str, kinds: dict, name: str, ask: dict, status: str) -> tuple[int, list[str]]:
    """Runs a case; returns the number of objects that were checked, and what is wrong with them."""
    code, text = post(url, ask)
    if status == "404":
        return 1, [] if code == 404 and "error" in json.loads(text) else [f"{code}: {text}"]
    if code != 200:
        return 1, [f"{code}: {json.loads(text)['error']['message']}"]
    found, wrong = 0, []
    if ask.get("stream"):
        events = events_of(text)
        for number, event in enumerate(events):
            found += 1
            wrong += problems(kinds, event["type"], event)
            if event["sequence_number"] != number:
                wrong.append(f"event {number} has the number {event['sequence_number']}")
        response = events[-1]["response"]
    else:
        response = json.loads(text)
    wrong += problems(kinds, "", response)
    if response["status"] != status or not response["output"]:
        wrong.append(f"the status is {response['status']}, with {len(response['output'])} items")
    if "tools" in ask and not any(item["type"] == "function_call" for item in response["output"]):
        wrong.append("there is no call")
    if name == "stored and continued":
        more, others = check(url, kinds, "", ask | {"previous_response_id": response["id"]}, status)
        found, wrong = found + more, wrong + others
    return found + 1, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url is None:
        from check import random_weights, with_server  # noqa: PLC0415
        from tools import venv  # noqa: PLC0415

        python = venv("openresponses", [PACKAGE], least=(3, 11))
        with tempfile.TemporaryDirectory() as folder:
            command = [str(python), __file__, *sys.argv[1:]]
            run = lambda url: str(subprocess.run([*command, "--url", url]).returncode)  # noqa: E731
            sys.exit(int(with_server(random_weights(arguments.cleave, folder), run)))
    kinds = schemas()
    rows, unknown = [], 0
    for name, (ask, status) in CASES.items():
        found, wrong = check(arguments.url, kinds, name, ask, status)
        why = {next((key for key, part in KNOWN.items() if part in one), one) for one in wrong}
        unknown += len(why - KNOWN.keys())
        rows.append(f"| {name} | {found} | {'equal' if not wrong else 'different'} | {', '.join(sorted(why))} |")
    table = "\n".join(["| case | objects checked | result | why |", "|---|---:|---|---|", *rows])
    print(table)
    if arguments.table:
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
