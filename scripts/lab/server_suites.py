#!/usr/bin/env python3
"""Runs vLLM's tests of a running server against Cleave.

usage: server_suites.py --cleave BIN [--suites FOLDER] [--verbose]

The tests (tests/tool_use, and those of Anthropic's Messages and OpenAI's Responses in tests/entrypoints) come from
PyPI's source of vllm and run unchanged, by pytest. This file is also the pytest plugin that stands in for the package
`vllm`: where a test starts vLLM with a model, it starts Cleave with a mock engine that answers by server_suites.yaml,
with the texts that the tests expect of a good model. The sources come into --suites, by default a temporary folder;
nothing of them is kept. Prints the rows of docs/benchmarks/parser-suites.md, with --verbose each failure too.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "ci" / name) for name in ("clients", "balancers")]

SUITES = {
    "tests/tool_use": ["test_chat_completions", "test_tool_calls", "test_parallel_tool_calls"],
    "tests/entrypoints/anthropic": ["test_messages"],
    "tests/entrypoints/openai/responses": [
        "test_basic", "test_simple", "test_function_call", "test_structured_output", "test_stateful",
    ],
}
PACKAGES = ("pytest==9.0.1", "pytest-asyncio==1.3.0", "pytest-timeout==2.4.0", "openai==3.51.0", "anthropic==2.14.0")


class Server:
    """Stands in for vLLM's server of a test: Cleave under the name of the test's model."""

    def __init__(self, model: str, arguments: list[str] = (), **_) -> None:
        named = dict(zip(arguments, arguments[1:])).get("--served-model-name", model)
        self.name = named
        self.open = contextlib.ExitStack()

    def __enter__(self) -> "Server":
        import scripted

        folder = self.open.enter_context(tempfile.TemporaryDirectory())
        script = HERE / "server_suites.yaml"
        server = scripted.serve(os.environ["CLEAVE"], folder, script, "--served-model-name", self.name)
        self.open.callback(server.end)
        self.url = scripted.address(server)
        return self

    def __exit__(self, *_) -> None:
        self.open.close()

    def get_async_client(self, **more):
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **more)

    def get_async_client_anthropic(self, **more):
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, **more)


def stand_in() -> None:
    """Makes the modules that the tests import from vLLM and from its tests."""
    modules = {
        "vllm": {},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_rocm=lambda: False)},
        "vllm.transformers_utils": {},
        "vllm.transformers_utils.repo_utils": {"hf_api": lambda: types.SimpleNamespace(snapshot_download=print)},
        "tests.utils": {"RemoteOpenAIServer": Server, "VLLM_PATH": pathlib.Path()},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def pytest_load_initial_conftests() -> None:
    stand_in()


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.failed or report.skipped:
        entry = {"test": report.nodeid, "outcome": report.outcome, "text": str(report.longrepr or "")}
        with open(os.environ["SUITE_RESULTS"], "a") as results:
            results.write(json.dumps(entry) + "\n")


def run(folder: pathlib.Path, cleave: str, verbose: bool) -> None:
    """Runs the tests; prints a row for each file."""
    from tools import venv

    python = venv("server-suites", PACKAGES)
    results = folder / "server-results"
    results.unlink(missing_ok=True)
    paths = os.pathsep.join([str(HERE), str(folder)])
    environment = os.environ | {"CLEAVE": cleave, "SUITE_RESULTS": str(results), "PYTHONPATH": paths}
    tests = [f"{path}/{name}.py" for path, names in SUITES.items() for name in names]
    (folder / "tests" / "entrypoints" / "conftest.py").unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "server_suites", "-c", os.devnull, "--rootdir", ".", *tests, "--models", "hermes"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if not results.exists():
        sys.exit(done.stdout)
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    print("| vLLM's tests of a server | tests | pass | fail |\n|---|---:|---:|---:|")
    for path, names in SUITES.items():
        for name in names:
            mine = [entry for entry in entries if f"{path}/{name}.py" in entry["test"]]
            counts = collections.Counter(entry["outcome"] for entry in mine)
            passed, failed = counts["passed"], counts["failed"]
            print(f"| {path.removeprefix('tests/')}/{name} | {passed + failed} | {passed} | {failed} |")
            for entry in mine if verbose else []:
                if entry["outcome"] == "failed":
                    reason = [line[1:].strip() for line in entry["text"].splitlines() if line.startswith("E ")]
                    print(f"  {entry['test'].split('/')[-1]}: " + " | ".join(reason)[:400])


def main() -> None:
    import parser_suites

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--suites", type=pathlib.Path)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        suites = (args.suites or pathlib.Path(temporary)).resolve()
        suites.mkdir(parents=True, exist_ok=True)
        parser_suites.fetch_vllm(suites)
        run(suites / "vllm", str(pathlib.Path(args.cleave).resolve()), args.verbose)


if __name__ == "__main__":
    main()
