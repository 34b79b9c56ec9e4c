"""Runs clients and load generators of other projects against Cleave (docs/benchmarks/clients.md).

usage: check.py --cleave BIN [--only NAME ...] [--long] [--generators] [--table]

OpenAI's Python and Node clients (chat, completions, Responses, streams with comments in them, usage, errors, retries
after refusals; tools and schemas in Python), Anthropic's Python client and schemathesis (valid and invalid requests,
generated from our /openapi.json) run against one server each. SDKs built on these APIs (AI SDK, LangChain and others)
run against a mock engine that answers by scripted/script.yaml, so that each text and call is compared. With --long
further SDKs do, command-line agents do a task of two turns by scripted/agents.yaml, and lm-eval runs against the
bundled checkpoint. With --generators aiperf, inference-perf and
SGLang's bench_serving measure goodput through nginx, which stands before two routers with mock workers. --table writes
the results into docs/benchmarks/clients.md, together with those of earlier runs in results.json. Each tool has a folder
of its own under target/clients; a tool that cannot be installed is reported as SKIPPED. Exits with 1 if a tool that ran
found a failure. Standard library only.

Anthropic's Python client, and OpenAI's with the Responses API, run against random weights with a template for tools.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "balancers"))

from fleet import PREFILL, Fleet, Process, balancer  # noqa: E402

from stream import ask  # noqa: E402

import agents  # noqa: E402
import generators  # noqa: E402
import scripted  # noqa: E402
from scripted import address  # noqa: E402
from tools import SPENT, Skipped, npm, run, venv  # noqa: E402

RESULTS = HERE / "results.json"
BEGIN, END = "<!-- clients: begin, by scripts/ci/clients/check.py --table -->", "<!-- clients: end -->"
OPENAI_PYTHON, OPENAI_NODE, SCHEMATHESIS = "3.51.0", "6.49.0", "4.32.5"
ANTHROPIC, LM_EVAL, TRANSFORMERS = "2.14.0", "0.4.13", "5.17.0"
# Comments stand between most tokens; no client may take a comment for a token.
TALKATIVE = ("--sse-keep-alive", "0.001")


def demo(cleave: str) -> Process:
    return Process(cleave, "serve", "--port", "0", "--threads", "2", "--kv-cache", "64MiB", *TALKATIVE)


def with_server(server: Process, use: Callable[[str], str]) -> str:
    try:
        return use(address(server))
    finally:
        server.end()


def openai_python(cleave: str) -> str:
    """Runs OpenAI's Python client."""
    python = venv("openai", [f"openai=={OPENAI_PYTHON}"])
    scripts = ROOT / "tests" / "openai"

    def use(url: str) -> str:
        for script in ("client.py", "retry.py"):
            run([python, scripts / script, url])
        return "models, chat, completions, streams, usage, log-probabilities, errors, leaving, `Retry-After`"

    return with_server(demo(cleave), use)


def random_weights(cleave: str, folder: str) -> Process:
    """Serves random weights with Qwen3's chat template, in which the prompt opens the reasoning."""
    shutil.copytree(ROOT / "testdata" / "qwen3", folder, dirs_exist_ok=True)
    config = Path(folder) / "config.json"
    # Tools take more than the context of the small checkpoint.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    template = Path(folder) / "chat_template.jinja"
    closing = r"{{- '<think>\n\n</think>\n\n' }}"
    template.write_text(template.read_text().replace(closing, closing + r"{%- else %}{{- '<think>\n' }}"))
    return Process(cleave, "serve", "--port", "0", "--threads", "2", "--kv-cache", "64MiB", "--model", folder, *TALKATIVE)


def with_random_weights(cleave: str, package: str, script: str, checked: str) -> str:
    """Runs a client's script against random weights; `package` is the client, with its version."""
    python = venv(package.partition("==")[0], [package])
    with tempfile.TemporaryDirectory() as folder:

        def use(url: str) -> str:
            run([python, ROOT / "tests" / script, url])
            return checked

        return with_server(random_weights(cleave, folder), use)


def openai_responses(cleave: str) -> str:
    """Runs OpenAI's Python client on the Responses API."""
    checked = "responses, streams, `.parse`, required tools, a second turn, reasoning, errors"
    return with_random_weights(cleave, f"openai=={OPENAI_PYTHON}", "openai/responses.py", checked)


def openai_embeddings(cleave: str) -> str:
    """Runs OpenAI's Python client on a model that embeds."""
    python = venv("openai", [f"openai=={OPENAI_PYTHON}"])
    model = str(ROOT / "testdata" / "qwen3")
    server = Process(cleave, "serve", "--port", "0", "--threads", "2", "--kv-cache", "64MiB", "--model", model, "--pooling", "mean")

    def use(url: str) -> str:
        run([python, ROOT / "tests" / "openai" / "embeddings.py", url])
        return "embeddings in base64 and in numbers, of texts and tokens, `dimensions`, errors"

    return with_server(server, use)


def anthropic_python(cleave: str) -> str:
    """Runs Anthropic's Python client."""
    checked = "messages, streams, counts of tokens, required tools, a second turn, thinking, errors"
    return with_random_weights(cleave, f"anthropic=={ANTHROPIC}", "anthropic/client.py", checked)


def openai_tools(cleave: str) -> str:
    """Runs OpenAI's Python client with tools and schemas in chat."""
    checked = "`.parse`, `.stream`, strict and required tools, a second turn, reasoning"
    return with_random_weights(cleave, f"openai=={OPENAI_PYTHON}", "openai/tools.py", checked)


def openai_node(cleave: str) -> str:
    """Runs OpenAI's Node client."""
    folder = npm("node", [f"openai@{OPENAI_NODE}"])

    def use(url: str) -> str:
        run(["node", HERE / "openai_node.mjs", url], cwd=folder)
        return "models, chat, completions, streams, usage, log-probabilities, errors, leaving, `Retry-After`"

    return with_server(demo(cleave), use)


def schemathesis(cleave: str, examples: int = 20) -> str:
    """Sends requests that schemathesis generates from /openapi.json."""
    python = venv("schemathesis", [f"schemathesis=={SCHEMATHESIS}"])
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        profile.write_text(json.dumps(PREFILL))
        server = Process(cleave, "serve", "--port", "0", "--engine", "mock", "--mock-profile", str(profile), "--max-model-len", "256")

        def use(url: str) -> str:
            # Rules beyond JSON schema (the vocabulary, the context, a template's requirements) refuse requests that the
            # schema allows; requests to /admin would drain the workers.
            said = run([
                python.parent / "schemathesis", "run", f"{url}/openapi.json", "--url", url, "--no-color", "--seed", "1",
                "--exclude-path-regex", "^/admin", "--phases", "examples,coverage,fuzzing", "--max-examples", str(examples),
                "--request-timeout", "30", "--exclude-checks", "positive_data_acceptance",
            ], cwd=folder)
            cases = re.search(r"(\d+) generated", said).group(1)
            if server.child.poll() is not None:
                raise AssertionError("the server ended")
            return f"{cases} requests by the document, right and wrong ones: every answer as it says"

        return with_server(server, use)


def lm_eval(cleave: str) -> str:
    """Runs lm-eval on the bundled checkpoint."""
    python = venv("lm-eval", [f"lm-eval[api]=={LM_EVAL}", f"transformers=={TRANSFORMERS}"])

    def use(url: str) -> str:
        run([python, HERE / "lm_eval_client.py", url, "cleave-demo", ROOT / "assets" / "demo"], env=scripted.QUIET)
        return "`local-completions`: log-probabilities of continuations, texts; `local-chat-completions`: texts"

    return with_server(demo(cleave), use)


def through_nginx(cleave: str, measure: Callable[[str], str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(cleave, Path(folder), 15)
        try:
            with balancer("nginx", fleet, 60) as one:
                if isinstance(one, str):
                    raise Skipped(one)
                # The first hand-off between two workers sets up their link.
                for router in fleet.routers:
                    ask(router, {"max_tokens": 4})
                return measure(f"http://{one.address}")
        finally:
            fleet.end()


# The longest run comes first: it goes on while the other clients are installed.
FIRST = "schemathesis"
CLIENTS = {
    "OpenAI Python": (OPENAI_PYTHON, openai_python),
    "OpenAI Python with tools": (OPENAI_PYTHON, openai_tools),
    "OpenAI Python, Responses": (OPENAI_PYTHON, openai_responses),
    "OpenAI Python, embeddings": (OPENAI_PYTHON, openai_embeddings),
    "Anthropic Python": (ANTHROPIC, anthropic_python),
    "OpenAI Node": (OPENAI_NODE, openai_node),
    "schemathesis": (SCHEMATHESIS, schemathesis),
    **scripted.CLIENTS,
}
LONG_CLIENTS = {**scripted.LONG_CLIENTS, "lm-eval": (LM_EVAL, lm_eval), **agents.AGENTS}
GENERATORS = {
    "aiperf": (generators.AIPERF, lambda cleave: through_nginx(cleave, generators.aiperf)),
    "inference-perf": (generators.INFERENCE_PERF, lambda cleave: through_nginx(cleave, generators.inference_perf)),
    "SGLang bench_serving": (generators.SGLANG, lambda cleave: through_nginx(cleave, generators.bench_serving)),
}


def write_table(results: dict[str, dict]) -> None:
    """Writes the table into the page, between its marks."""
    rows = [f"| {name} {one['version']} | {one['works']} |" for name, one in results.items()]
    table = "\n".join([BEGIN, "| client | works, as run |", "|---|---|", *rows, END])
    page = ROOT / "docs/benchmarks/clients.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + table + rest.split(END)[1])


def main() -> None:
    every = CLIENTS | LONG_CLIENTS | GENERATORS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--only", nargs="+", choices=every)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--generators", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    chosen = args.only or [*CLIENTS, *(LONG_CLIENTS if args.long else ()), *(GENERATORS if args.generators else ())]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False

    def outcome(name: str) -> tuple[str, str, str]:
        began, SPENT.seconds = time.monotonic(), 0.0
        try:
            kind, said = "works", every[name][1](args.cleave)
        except Skipped as why:
            kind, said = "SKIPPED", str(why)
        except AssertionError as wrong:
            kind, said = "FAILED", str(wrong)
        seconds = time.monotonic() - began - SPENT.seconds
        return kind, said, f"{SPENT.seconds:.0f} s to install, {seconds:.0f} s to run"

    # OpenAI's clients wait for a `Retry-After` most of their time. Generators measure, so nothing runs beside them.
    with ThreadPoolExecutor(1 if args.generators else len(chosen)) as pool:
        begun = {name: pool.submit(outcome, name) for name in sorted(chosen, key=lambda name: name != FIRST)}
        for name in chosen:
            kind, said, took = begun[name].result()
            version = every[name][0]
            if kind == "works":
                results[name] = {"version": version, "works": said}
            failed |= kind == "FAILED"
            mark = "" if kind == "works" else f"{kind}: "
            print(f"{mark}{name} {version}: {said} ({took})", flush=True)
    if args.table:
        ordered = {name: results[name] for name in every if name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        write_table(ordered)
    sys.exit(failed)


if __name__ == "__main__":
    main()
