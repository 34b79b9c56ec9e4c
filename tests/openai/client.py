"""Tests a running server with the official OpenAI Python client: `client.py BASE_URL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import sys

import openai


def main() -> None:
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model

    # Chat gives the same text whole and streamed.
    messages = [{"role": "user", "content": "What is a slice?"}]
    ask = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason

    # Sampling is repeated by its seed, and choices differ from each other.
    draw = dict(ask, temperature=2.0, top_p=1.0, seed=11, n=3, max_tokens=16)
    first, second = (client.chat.completions.create(**draw) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(texts) == 3 and len(set(texts)) > 1

    # Log-probabilities are sorted, and the greedy token is the most likely one.
    scored = client.chat.completions.create(logprobs=True, top_logprobs=5, **ask)
    for entry in scored.choices[0].logprobs.content:
        top = [alternative.logprob for alternative in entry.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        assert abs(entry.logprob - top[0]) < 1e-6 and entry.logprob <= 0

    # Completions have echo, stop strings, several prompts and legacy log-probabilities.
    complete = client.completions.create
    plain = complete(model=model, prompt="A vector is", temperature=0, max_tokens=24)
    echoed = complete(model=model, prompt="A vector is", temperature=0, max_tokens=24, echo=True)
    assert echoed.choices[0].text == "A vector is" + plain.choices[0].text
    body = plain.choices[0].text
    cut = body[len(body) // 2 : len(body) // 2 + 3]
    stopped = complete(model=model, prompt="A vector is", temperature=0, max_tokens=24, stop=[cut])
    assert stopped.choices[0].text == body[: body.index(cut)] and stopped.choices[0].finish_reason == "stop"
    several = complete(model=model, prompt=["A vector is", "The borrow"], temperature=0, max_tokens=8)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert body.startswith(several.choices[0].text)
    legacy = complete(model=model, prompt="A vector is", temperature=0, max_tokens=4, logprobs=2)
    assert len(legacy.choices[0].logprobs.tokens) == 4

    # Errors name their field.
    def refused(kind, param, call):
        try:
            call()
        except kind as error:
            assert param is None or error.param == param, (error.param, param)
            return
        raise AssertionError(f"expected {kind.__name__} for {param}")

    refused(openai.NotFoundError, "model", lambda: client.chat.completions.create(**dict(ask, model="nonesuch")))
    refused(openai.BadRequestError, "temperature", lambda: client.chat.completions.create(**dict(ask, temperature=-1)))
    refused(openai.BadRequestError, "messages", lambda: client.chat.completions.create(**dict(ask, messages=[])))
    refused(openai.BadRequestError, None, lambda: complete(model=model, prompt="word " * 100_000, max_tokens=4))

    # The server goes on serving after a client that leaves in the middle of an answer.
    stream = complete(model=model, prompt="A", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert complete(model=model, prompt="A vector is", temperature=0, max_tokens=24).choices[0].text == body
    print("openai", openai.__version__, "ok")


if __name__ == "__main__":
    main()
