"""Tests the Responses API of a running server with OpenAI's Python client: `responses.py BASE_URL`.

The server's model may be a random one: only the request's own constraints make its calls valid. Exits with 0 when
every check held; the first check that fails raises.
"""

import sys
from typing import Literal

import openai
import pydantic


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=0, le=9)


def shown(response) -> list:
    """The items of a response, without their ids."""
    return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True) for item in response.output]


def main() -> None:
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    ask = {
        "model": client.models.list().data[0].id,
        "input": "How is the weather in Rome?",
        "instructions": "Be brief.",
        "temperature": 0.8,
        "extra_body": {"seed": 4, "thinking_token_budget": 8},
    }

    # A response is the same whole and streamed.
    whole = client.responses.create(**ask, max_output_tokens=24, store=True)
    assert whole.status in ("completed", "incomplete") and whole.output_text
    assert whole.store is True and whole.instructions == "Be brief." and whole.temperature == 0.8
    events = list(client.responses.create(**ask, max_output_tokens=24, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}" and shown(last.response) == shown(whole)
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert last.response.usage.input_tokens_details.cached_tokens > 0, "the second request finds its prefix"

    # A response is stored, listed, continued and removed.
    assert client.responses.retrieve(whole.id) == whole
    items = list(client.responses.input_items.list(whole.id, limit=1))
    assert [item.content[0].text for item in items] == [ask["input"]]
    later = client.responses.create(**dict(ask, input="And in Oslo?"), previous_response_id=whole.id, max_output_tokens=8)
    assert later.previous_response_id == whole.id and later.usage.input_tokens > whole.usage.input_tokens
    client.responses.delete(whole.id)

    # A required call has arguments by the schema, whole and streamed.
    schema = Weather.model_json_schema()
    tool = {"type": "function", "name": "weather", "parameters": schema | {"additionalProperties": False}, "strict": True}
    forced = dict(ask, tools=[tool, {"type": "web_search"}], tool_choice="required", parallel_tool_calls=False, max_output_tokens=1500)
    response = client.responses.create(**forced)
    assert response.status == "completed", response
    reasoning, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text
    assert call.type == "function_call" and call.name == "weather"
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**forced) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    expected = {"response.output_item.done", "response.function_call_arguments.done", "response.reasoning_text.delta"}
    assert expected <= kinds, kinds
    assert shown(final) == shown(response)

    # The items go back with the result, and the answer goes on.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}
    sent = [item.model_dump(exclude_none=True) for item in response.output]
    history = [{"role": "user", "content": ask["input"]}, *sent, result]
    second = client.responses.create(**dict(ask, input=history, tools=[tool], tool_choice="none", max_output_tokens=24))
    assert all(item.type != "function_call" for item in second.output)

    # An answer of a schema follows the reasoning.
    parsed = client.responses.parse(**ask, text_format=Weather, max_output_tokens=1500)
    assert isinstance(parsed.output_parsed, Weather)

    # Errors name their field.
    def refused(kind, param, call):
        try:
            call()
        except kind as error:
            assert error.param == param, (error.param, param)
            return
        raise AssertionError(f"expected {kind.__name__} for {param}")

    create = client.responses.create
    refused(openai.NotFoundError, "model", lambda: create(**dict(ask, model="nonesuch")))
    refused(openai.BadRequestError, "previous_response_id", lambda: create(**ask, previous_response_id="resp_1"))
    refused(openai.NotFoundError, "response_id", lambda: client.responses.retrieve("resp_1"))
    refused(openai.BadRequestError, "tool_choice.type", lambda: create(**ask, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}))
    refused(openai.BadRequestError, "input", lambda: create(**dict(ask, input="word " * 100_000)))
    print("openai", openai.__version__, "ok")


if __name__ == "__main__":
    main()
