"""Tests a server that answers by script.yaml with litellm, over three APIs: `litellm_client.py BASE_URL MODEL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import json
import sys

import litellm

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."
ROME = {"city": "Rome", "days": 3}
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}}


def check(**route) -> None:
    def ask(content: str, **more):
        return litellm.completion(messages=[{"role": "user", "content": content}], num_retries=0, **route, **more)

    whole = ask("Greet me")
    assert whole.choices[0].message.content == GREETING and whole.usage.completion_tokens > 0
    pieces = list(ask("Greet me", stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(pieces)
    assert streamed.choices[0].message.content == GREETING
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens

    # Two turns with a tool, whole and streamed.
    question = "How is the weather in Rome?"
    for stream in (False, True):
        answer = ask(question, tools=[TOOL], stream=stream)
        message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == ROME
        history = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]},
            {"role": "tool", "tool_call_id": call.id, "content": "clear, 21 degrees in Rome"},
        ]
        second = litellm.completion(messages=history, tools=[TOOL], num_retries=0, **route)
        assert second.choices[0].message.content == FINAL, second

    both = ask("Compare Rome and Oslo", tools=[TOOL]).choices[0].message
    assert [json.loads(call.function.arguments)["city"] for call in both.tool_calls] == ["Rome", "Oslo"]
    assert both.content.strip() == "I ask twice."


def main() -> None:
    url, name = sys.argv[1:]
    litellm.telemetry = False
    openai = {"api_base": url + "/v1", "api_key": "none"}
    check(model=f"openai/{name}", **openai)
    check(model=f"hosted_vllm/{name}", **openai)
    check(model=f"anthropic/{name}", api_base=url, api_key="none", max_tokens=2000)
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "Describe the trip"}]
    answer = litellm.completion(model=f"openai/{name}", messages=messages, response_format=form, **openai)
    assert json.loads(answer.choices[0].message.content) == ROME
    answered = litellm.responses(model=f"openai/{name}", input="Greet me", **openai)
    texts = [part.text for item in answered.output if item.type == "message" for part in item.content]
    assert texts == [GREETING]


main()
