"""Tests the Messages API of a running server with Anthropic's Python client: `client.py BASE_URL`.

The server's model may be a random one: only the request's own constraints make its calls valid. Exits with 0 when
every check held; the first check that fails raises.
"""

import json
import sys
import urllib.request

import anthropic


def shown(message) -> list:
    """The blocks of a message, without the ids of its calls, which are random."""
    return [block.model_dump(exclude={"id", "citations", "parsed_output"}, exclude_none=True) for block in message.content]


def main() -> None:
    url = sys.argv[1]
    with urllib.request.urlopen(url + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    draw = {"extra_body": {"temperature": 0.8, "seed": 4}}
    ask = {"model": model, "messages": messages, "max_tokens": 24, "system": "Be brief.", **draw}

    # A message is the same whole and streamed, and its prompt has the tokens that are counted.
    whole = client.messages.create(**ask)
    assert whole.role == "assistant" and whole.type == "message" and whole.id.startswith("msg_")
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.content[0].type == "text"
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text and shown(streamed) == shown(whole)
    assert streamed.stop_reason == whole.stop_reason and streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=model, messages=messages, system="Be brief.").input_tokens
    usage = streamed.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert usage.cache_read_input_tokens > 0, "the second request finds its prefix"

    # The billing line of Anthropic's command-line client changes with each request, and the prompt does not.
    def with_billing(session: str):
        first = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={session};"}
        blocks = [first, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        return client.messages.create(**dict(ask, system=blocks))

    for session in ("a1", "b2"):
        assert shown(with_billing(session)) == shown(whole)

    # A stop sequence ends the output and is named.
    body = whole.content[0].text
    cut = body[len(body) // 2 : len(body) // 2 + 3]
    stopped = client.messages.create(**dict(ask, stop_sequences=[cut]))
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == cut
    assert (stopped.content[0].text if stopped.content else "") == body[: body.index(cut)]

    # A required call has arguments by the schema, whole and streamed, after reasoning.
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"name": "weather", "description": "The weather of a city.", "input_schema": schema}
    forced = dict(ask, tools=[tool], max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 16})
    choices = ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    for choice in choices:
        message = client.messages.create(**forced, tool_choice=choice)
        assert message.stop_reason == "tool_use", message
        thinking, call = message.content
        assert thinking.type == "thinking" and thinking.thinking and thinking.signature
        assert call.type == "tool_use" and call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
        with client.messages.stream(**forced, tool_choice=choice) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        assert {"message_start", "content_block_start", "content_block_stop", "message_stop"} <= kinds, kinds
        assert shown(streamed) == shown(message) and streamed.stop_reason == "tool_use"

    # The call goes back with its result and the reasoning, and the answer goes on.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "clear"}]}
    history = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**dict(ask, messages=history, tools=[tool], tool_choice={"type": "none"}))
    assert all(block.type == "text" for block in second.content)

    # Errors are those of this API.
    def refused(kind, error_type, call):
        try:
            call()
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["type"] == error_type, error.body
            return
        raise AssertionError(f"expected {kind.__name__}")

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    create = client.messages.create
    refused(anthropic.NotFoundError, "not_found_error", lambda: create(**dict(ask, model="nonesuch")))
    refused(anthropic.BadRequestError, "invalid_request_error", lambda: create(**dict(ask, messages=[])))
    refused(anthropic.BadRequestError, "invalid_request_error", lambda: create(**dict(ask, messages=[{"role": "user", "content": [image]}])))
    refused(anthropic.NotFoundError, "not_found_error", lambda: client.messages.batches.list())
    long = [{"role": "user", "content": "word " * 100_000}]
    refused(anthropic.BadRequestError, "invalid_request_error", lambda: create(**dict(ask, messages=long)))
    print("anthropic", anthropic.__version__, "ok")


if __name__ == "__main__":
    main()
