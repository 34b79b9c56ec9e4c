"""Tests the official OpenAI Python client with a server that refuses it at first: `retry.py BASE_URL`.

Exits with 0 when it waited for the first refusal's retry-after, and then retried once.
"""

import sys
import time

import openai

try:
    import httpx2 as httpx  # the client's HTTP library, from its version 3 on
except ModuleNotFoundError:
    import httpx


def main() -> None:
    answers: list[tuple[float, httpx.Response]] = []
    hooks = {"response": [lambda response: answers.append((time.monotonic(), response))]}
    client = openai.OpenAI(
        base_url=sys.argv[1] + "/v1",
        api_key="none",
        max_retries=1,
        http_client=httpx.Client(event_hooks=hooks),
    )
    model = client.models.list().data[0].id
    answers.clear()
    try:
        client.completions.create(
            model=model, prompt="Never in time", max_tokens=4, extra_headers={"x-slo-ttft-ms": "0.001"}
        )
    except openai.RateLimitError as error:
        assert error.code == "slo_ttft_unreachable", error
    else:
        raise AssertionError("what cannot be met was served")
    assert [response.status_code for _, response in answers] == [429] * 2, answers
    (before, refused), (after, _) = answers
    told = float(refused.headers["retry-after-ms"]) / 1000
    assert after - before >= told, f"came back after {after - before} s, told to wait {told} s"


main()
