"""Tests a server that answers by script.yaml with instructor: `instructor_client.py BASE_URL MODEL`.

Exits with 0 when every check held; the first check that fails raises.
"""

import sys

import instructor
import openai
from pydantic import BaseModel


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


def main() -> None:
    url, name = sys.argv[1:]
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    ask = {"model": name, "messages": [{"role": "user", "content": "Describe the trip"}], "response_model": Trip, "max_retries": 0}
    modes = instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA
    for mode in modes:
        made = instructor.from_openai(client, mode=mode)
        whole = made.chat.completions.create(**ask)
        assert isinstance(whole, Trip) and whole.model_dump() == {"city": "Rome", "days": 3}, (mode, whole)
        partial = list(made.chat.completions.create_partial(**ask))
        assert partial[-1].model_dump() == {"city": "Rome", "days": 3}, (mode, partial)


main()
