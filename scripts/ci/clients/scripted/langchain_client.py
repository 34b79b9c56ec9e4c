"""Tests a server that answers by script.yaml with LangChain, over three APIs: `langchain_client.py BASE_URL MODEL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."
ROME = {"city": "Rome", "days": 3}


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"clear, 21 degrees in {city}"


def text_of(message) -> str:
    """The text of a message, whose content is a text or a list of blocks."""
    if isinstance(message.content, str):
        return message.content
    return "".join(block.get("text", "") for block in message.content if block.get("type") == "text")


def check(chat, methods: tuple[str, ...]) -> None:
    assert text_of(chat.invoke("Greet me")) == GREETING
    pieces = list(chat.stream("Greet me"))
    assert "".join(map(text_of, pieces)) == GREETING and len(pieces) > 2

    # Two turns, whole and streamed; pieces of a call are added up.
    with_tools = chat.bind_tools([weather])
    messages = [HumanMessage("How is the weather in Rome?")]
    whole = with_tools.invoke(messages)
    added = None
    for piece in with_tools.stream(messages):
        added = piece if added is None else added + piece
    for answer in (whole, added):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", ROME)], answer
        (call,) = answer.tool_calls
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        assert text_of(with_tools.invoke([*messages, answer, result])) == FINAL

    both = with_tools.invoke("Compare Rome and Oslo")
    assert [call["args"]["city"] for call in both.tool_calls] == ["Rome", "Oslo"] and text_of(both).strip() == "I ask twice."

    for method in methods:
        assert chat.with_structured_output(Trip, method=method).invoke("Describe the trip") == Trip(**ROME), method


def main() -> None:
    url, name = sys.argv[1:]
    openai = {"base_url": url + "/v1", "api_key": "none", "model": name, "max_retries": 0}
    check(ChatOpenAI(**openai), ("json_schema", "function_calling"))
    check(ChatOpenAI(**openai, use_responses_api=True), ("json_schema", "function_calling"))
    check(ChatAnthropic(base_url=url, api_key="none", model=name, max_retries=0, max_tokens=2000), ("function_calling",))


main()
