"""SDKs of other projects against a mock engine that answers by scripted/script.yaml.

Owns: the server, and the packages of each SDK. Never: judges an answer: each client compares it with the script.
"""

import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet import PREFILL, Process

from tools import FOLDER, ROOT, node, npm, run, venv

SCRIPTED = Path(__file__).resolve().parent / "scripted"
# No package sends reports about its use, or looks for a newer version of itself.
QUIET = os.environ | {
    "DO_NOT_TRACK": "1", "LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYDANTIC_AI_NO_TELEMETRY": "1", "HF_HUB_OFFLINE": "1",
}
# Steps take no time, and agents' prompts are long in tokens of a small vocabulary.
PROFILE = PREFILL | {"context_tokens": 1_000_000, "kv_tokens": 4_000_000, "step_tokens": 65_536}
AI_SDK = {"ai": "7.0.173", "@ai-sdk/openai": "4.0.118", "@ai-sdk/openai-compatible": "3.0.92", "@ai-sdk/anthropic": "4.0.105"}
OPENAI_NODE, ZOD = "7.57.0", "4.6.7"
LANGCHAIN, LANGCHAIN_ANTHROPIC = "1.7.4", "1.7.10"
PYDANTIC_AI, INSTRUCTOR, LITELLM = "2.68.0", "1.17.0", "1.110.2"
OPENAI_AGENTS, LLAMA_INDEX, LLM = "0.24.0", "0.8.1", "0.36"


def serve(cleave: str, folder: str, script: Path, *more: str) -> Process:
    """Serves a script's answers with Qwen3's chat template and formats."""
    model = Path(folder) / "model"
    model.mkdir()
    for path in (ROOT / "testdata" / "qwen3").iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, model)
    profile = Path(folder) / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    return Process(
        cleave, "serve", "--port", "0", "--engine", "mock", "--mock-profile", str(profile), "--mock-script", str(script),
        "--model", str(model), "--prefill", "1", "--decode", "1", "--placement", "split", *more,
    )


def address(server: Process) -> str:
    return "http://" + server.said(r"listening on http://(\S+)")


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return json.load(answer)["data"][0]["id"]


def with_script(cleave: str, use: Callable[[str], str], script: Path = SCRIPTED / "script.yaml") -> str:
    """Calls `use` with the address of a server that answers by the script."""
    with tempfile.TemporaryDirectory() as folder:
        server = serve(cleave, folder, script)
        try:
            return use(address(server))
        finally:
            server.end()


def python_client(cleave: str, name: str, packages: Sequence[str], works: str) -> str:
    """Runs a client in Python."""
    python = venv(name, packages)
    script = SCRIPTED / f"{name.replace('-', '_')}_client.py"

    def use(url: str) -> str:
        run([python, script, url, model_of(url)], cwd=FOLDER / name, env=QUIET)
        return works

    return with_script(cleave, use)


def node_client(cleave: str, name: str, packages: Sequence[str], works: str) -> str:
    """Runs a client in Node."""
    folder = npm(name, packages)

    def use(url: str) -> str:
        run([node(), SCRIPTED / f"{name.replace('-', '_')}.mjs", url], cwd=folder, env=QUIET)
        return works

    return with_script(cleave, use)


def ai_sdk(cleave: str) -> str:
    """Runs Vercel's AI SDK."""
    packages = [*(f"{name}@{version}" for name, version in AI_SDK.items()), f"zod@{ZOD}"]
    works = ("`generateText`, `streamText`, tools in two turns, two calls at once, `Output.object` whole and streamed, "
             "`generateObject`, by chat completions, Responses, openai-compatible and Messages")
    return node_client(cleave, "ai-sdk", packages, works)


def openai_node(cleave: str) -> str:
    """Runs OpenAI's Node client and its helpers."""
    works = "`.parse` and `.stream` with zod, `runTools`, Responses: text, `.parse`, stream, a second turn"
    return node_client(cleave, "openai-node", [f"openai@{OPENAI_NODE}", f"zod@{ZOD}"], works)


def langchain(cleave: str) -> str:
    """Runs LangChain."""
    packages = [f"langchain-openai=={LANGCHAIN}", f"langchain-anthropic=={LANGCHAIN_ANTHROPIC}"]
    works = ("`invoke`, `stream`, `bind_tools` in two turns, two calls at once, `with_structured_output`, by ChatOpenAI (chat "
             "completions, Responses) and ChatAnthropic")
    return python_client(cleave, "langchain", packages, works)


def pydantic_ai(cleave: str) -> str:
    """Runs pydantic-ai."""
    works = "agents with a tool, output by a tool and by a schema, streams, by chat completions, Responses and Messages"
    return python_client(cleave, "pydantic-ai", [f"pydantic-ai-slim[openai,anthropic]=={PYDANTIC_AI}"], works)


def instructor(cleave: str) -> str:
    """Runs instructor."""
    works = "models by tools, strict tools, JSON and schemas, whole and partial"
    return python_client(cleave, "instructor", [f"instructor=={INSTRUCTOR}"], works)


def litellm(cleave: str) -> str:
    """Runs litellm."""
    works = ("text, streams, usage, tools in two turns, two calls at once, by `openai/`, `hosted_vllm/` and `anthropic/`; a "
             "schema; `responses`")
    return python_client(cleave, "litellm", [f"litellm=={LITELLM}"], works)


def openai_agents(cleave: str) -> str:
    """Runs OpenAI's Agents SDK."""
    works = "agents with a tool, streams, output by a schema, by Responses and chat completions"
    return python_client(cleave, "openai-agents", [f"openai-agents=={OPENAI_AGENTS}"], works)


def llama_index(cleave: str) -> str:
    """Runs LlamaIndex."""
    works = "chat, streams, an agent with a tool, a structured answer"
    return python_client(cleave, "llama-index", [f"llama-index-llms-openai-like=={LLAMA_INDEX}"], works)


def llm(cleave: str) -> str:
    """Runs the command-line tool llm."""
    works = "a prompt, whole and streamed, a function in two turns, a schema, counts of tokens in its log"
    return python_client(cleave, "llm", [f"llm=={LLM}"], works)


CLIENTS = {
    "AI SDK": (AI_SDK["ai"], ai_sdk),
    "OpenAI Node with zod": (OPENAI_NODE, openai_node),
    "LangChain": (LANGCHAIN, langchain),
    "litellm": (LITELLM, litellm),
}
# Their protocol is that of the clients above, and their packages are large.
LONG_CLIENTS = {
    "pydantic-ai": (PYDANTIC_AI, pydantic_ai),
    "instructor": (INSTRUCTOR, instructor),
    "OpenAI Agents SDK": (OPENAI_AGENTS, openai_agents),
    "LlamaIndex": (LLAMA_INDEX, llama_index),
    "llm": (LLM, llm),
}
