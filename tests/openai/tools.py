"""Tests tools, schemas and reasoning of a running server with the official OpenAI Python client: `tools.py BASE_URL`.

The server's model may be a random one: only the request's own constraints make its answers valid. Exits with 0 when
every check held; the first check that fails raises.
"""

import json
import sys
from typing import Literal

import openai
import pydantic


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=0, le=9)


def shown(message) -> tuple:
    """The parts of a message, without the ids of its calls, which are random."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content, getattr(message, "reasoning_content", None), calls


def main() -> None:
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    tool = openai.pydantic_function_tool(Weather, name="weather")
    assert tool["function"]["strict"], "the helper makes strict tools"
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    ask = {
        "model": client.models.list().data[0].id,
        "messages": messages,
        "max_tokens": 1500,
        "temperature": 0.8,
        "seed": 4,
        "extra_body": {"thinking_token_budget": 16},
    }
    forced = dict(ask, tools=[tool], tool_choice="required", parallel_tool_calls=False)

    # A required call has arguments of the model, whole and streamed.
    choice = client.chat.completions.parse(**forced).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Weather)
    assert choice.message.content is None and choice.message.reasoning_content
    with client.chat.completions.stream(**forced) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert shown(final.message)[2] == shown(choice.message)[2] and final.finish_reason == "tool_calls"
    assert isinstance(final.message.tool_calls[0].function.parsed_arguments, Weather)

    # The call goes back with its result, and the answer goes on.
    answer = choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls", "reasoning_content"})
    answer["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}]
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})}
    second = client.chat.completions.create(**dict(forced, messages=[*messages, answer, result], tool_choice="none", max_tokens=40))
    assert not second.choices[0].message.tool_calls

    # A function by name ends with `stop`.
    named = dict(forced, tool_choice={"type": "function", "function": {"name": "weather"}})
    choice = client.chat.completions.create(**named).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls[0].function.name == "weather"

    # An answer of a schema follows the reasoning, whole and streamed.
    parsed = client.chat.completions.parse(**dict(ask, response_format=Weather)).choices[0].message
    assert isinstance(parsed.parsed, Weather) and parsed.reasoning_content
    with client.chat.completions.stream(**dict(ask, response_format=Weather)) as stream:
        streamed = [event.parsed for event in stream if event.type == "content.done"]
    assert streamed == [parsed.parsed]

    # A keyword that cannot be enforced is refused.
    broken = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "propertyNames": {}}}}
    try:
        client.chat.completions.create(**dict(ask, tools=[broken]))
    except openai.BadRequestError as error:
        assert error.param == "tools", error
    else:
        raise AssertionError("a keyword without effect was accepted")


main()
