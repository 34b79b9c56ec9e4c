"""Tests a server that answers by script.yaml with LlamaIndex: `llama_index_client.py BASE_URL MODEL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."
asked = []


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    asked.append((city, days))
    return f"clear, 21 degrees in {city}"


async def main() -> None:
    url, name = sys.argv[1:]
    llm = OpenAILike(
        model=name, api_base=url + "/v1", api_key="none", is_chat_model=True, is_function_calling_model=True, max_retries=0,
        context_window=60_000,
    )
    assert llm.chat([ChatMessage(role="user", content="Greet me")]).message.content == GREETING
    deltas = [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="Greet me")])]
    assert "".join(deltas) == GREETING
    answer = await FunctionAgent(tools=[weather], llm=llm).run("How is the weather in Rome?")
    assert str(answer) == FINAL and asked == [("Rome", 3)], (str(answer), asked)
    assert llm.as_structured_llm(Trip).complete("Describe the trip").raw == Trip(city="Rome", days=3)


asyncio.run(main())
