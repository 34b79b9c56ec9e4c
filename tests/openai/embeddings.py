"""Tests embeddings of a running server with OpenAI's Python client: `embeddings.py BASE_URL`.

The server's model embeds; its weights may be random. Exits with 0 when every check held; the first check that fails
raises.
"""

import math
import sys
from array import array

import openai


def main() -> None:
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0]
    assert model.task == "embed"

    # The client asks for base64 unless it is told otherwise, and decodes it; JSON numbers are the same ones of 32 bits.
    texts = ["A sequence moves.", "é 漢 🦀"]
    packed = client.embeddings.create(model=model.id, input=texts)
    plain = client.embeddings.create(model=model.id, input=texts, encoding_format="float")
    assert [entry.index for entry in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data):
        assert array("f", one.embedding) == array("f", other.embedding)
        assert math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0

    # Tokens are inputs as well, and a shorter embedding is normalised again.
    tokens = client.embeddings.create(model=model.id, input=[[5, 6, 7], [8]], dimensions=4)
    assert [len(entry.embedding) for entry in tokens.data] == [4, 4]
    assert math.isclose(math.hypot(*tokens.data[0].embedding), 1, abs_tol=1e-5)

    for wrong in ({"input": ["a", ""]}, {"input": "a", "dimensions": 1 << 20}, {"input": []}):
        try:
            client.embeddings.create(model=model.id, **wrong)
            raise AssertionError(f"{wrong} was served")
        except openai.BadRequestError as error:
            assert error.param
    try:
        client.completions.create(model=model.id, prompt="a")
        raise AssertionError("an embedding model generated")
    except openai.BadRequestError as error:
        assert error.param == "model"


if __name__ == "__main__":
    main()
