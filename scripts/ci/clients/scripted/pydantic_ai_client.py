"""Tests a server that answers by script.yaml with pydantic-ai, over three APIs: `pydantic_ai_client.py BASE_URL MODEL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


async def check(model, has_schemas: bool) -> None:
    asked = []

    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return f"clear, 21 degrees in {city}"

    assert (await Agent(model).run("Greet me")).output == GREETING
    async with Agent(model).run_stream("Greet me") as stream:
        assert [piece async for piece in stream.stream_text(debounce_by=None)][-1] == GREETING

    # A tool, then a text; a tool, then an object by the output's own tool; whole and streamed.
    agent = Agent(model, tools=[weather])
    assert (await agent.run("How is the weather in Rome?")).output == FINAL
    async with agent.run_stream("How is the weather in Rome?") as stream:
        assert await stream.get_output() == FINAL
    typed = Agent(model, tools=[weather], output_type=Trip)
    assert (await typed.run("How is the weather in Rome?")).output == Trip(city="Rome", days=3)
    assert asked == [("Rome", 3)] * 3, asked

    if has_schemas:
        native = Agent(model, output_type=NativeOutput(Trip))
        assert (await native.run("Describe the trip")).output == Trip(city="Rome", days=3)


async def main() -> None:
    url, name = sys.argv[1:]
    openai = OpenAIProvider(base_url=url + "/v1", api_key="none")
    await check(OpenAIChatModel(name, provider=openai), has_schemas=True)
    await check(OpenAIResponsesModel(name, provider=openai), has_schemas=True)
    await check(AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none")), has_schemas=False)


asyncio.run(main())
