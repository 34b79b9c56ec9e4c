"""Tests a server that answers by script.yaml with the command-line tool `llm`: `llm_client.py BASE_URL MODEL`.

The tool is called as a user calls it, with the server in its list of OpenAI-compatible models. Exits with 0 when every
check held; the first check that fails raises.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GREETING = "Hello, grüß dich, 你好 👋\nand that is all."
FINAL = "Rome is clear, at 21 degrees."
WEATHER = '''
def weather(city: str, days: int) -> str:
    "The weather of a city."
    return "clear, 21 degrees in " + city
'''


def main() -> None:
    url, name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home:
        entry = {
            "model_id": "served", "model_name": name, "api_base": f"{url}/v1", "supports_schema": True, "supports_tools": True,
        }
        # JSON is YAML.
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        environment = os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}

        def llm(*words: str) -> str:
            command = [str(Path(sys.executable).parent / "llm"), *words]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=60)
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
            return done.stdout.strip()

        assert llm("-m", "served", "Greet me") == GREETING
        assert llm("-m", "served", "--no-stream", "Greet me") == GREETING
        question = "How is the weather in Rome?"
        assert llm("-m", "served", "--functions", WEATHER, question) == FINAL
        assert llm("-m", "served", "--no-stream", "--functions", WEATHER, question) == FINAL
        trip = llm("-m", "served", "--schema", "city, days int", "Describe the trip")
        assert json.loads(trip) == {"city": "Rome", "days": 3}, trip
        logged = json.loads(llm("logs", "--json", "-n", "1"))[0]
        assert logged["input_tokens"] > 0 and logged["output_tokens"] > 0, logged


if __name__ == "__main__":
    main()
