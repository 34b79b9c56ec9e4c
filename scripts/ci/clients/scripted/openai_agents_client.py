"""Tests a server that answers by script.yaml with OpenAI's Agents SDK, over two APIs.

usage: openai_agents_client.py BASE_URL MODEL

Exits with 0 when every check held; the first check that fails raises.
"""

import asyncio
import sys

import agents
import openai
from pydantic import BaseModel

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."
asked = []


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


@agents.function_tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    asked.append((city, days))
    return f"clear, 21 degrees in {city}"


async def check(model) -> None:
    agent = agents.Agent(name="Guide", instructions="Be brief.", model=model, tools=[weather])
    assert (await agents.Runner.run(agent, "Greet me")).final_output == GREETING
    assert (await agents.Runner.run(agent, "How is the weather in Rome?")).final_output == FINAL
    stream = agents.Runner.run_streamed(agent, "How is the weather in Rome?")
    kinds = [event.name async for event in stream.stream_events() if event.type == "run_item_stream_event"]
    assert stream.final_output == FINAL and {"tool_called", "tool_output"} <= set(kinds), kinds
    assert asked == [("Rome", 3)] * 2, asked
    asked.clear()
    typed = agents.Agent(name="Planner", model=model, output_type=Trip)
    assert (await agents.Runner.run(typed, "Describe the trip")).final_output == Trip(city="Rome", days=3)


async def main() -> None:
    url, name = sys.argv[1:]
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    await check(agents.OpenAIResponsesModel(model=name, openai_client=client))
    await check(agents.OpenAIChatCompletionsModel(model=name, openai_client=client))


asyncio.run(main())
