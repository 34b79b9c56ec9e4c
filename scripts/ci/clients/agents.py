"""Command-line agents, each with a task of two turns: a command by a tool call, then the answer.

Owns: their settings, and the checks of the file that the command made and of the final text. Never: runs in the home of
a person, or has a variable of the caller's but for those named here. None of their packages is kept but in
target/clients; Claude Code is proprietary and is only run.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripted import SCRIPTED, model_of, with_script
from tools import FOLDER, node, npm, run

CODEX, OPENCODE, CLAUDE_CODE = "0.171.0", "1.18.33", "2.1.332"
TASK = "Write the word Cleave into the file hello.txt."
FINAL = "The file hello.txt has the word Cleave."


def with_agent(cleave: str, name: str, act: Callable[[str, Path, dict[str, str]], str]) -> str:
    """Calls `act` with a server, a new folder and a new environment; it gives what the agent said."""
    # Codex makes no programs below the folder for temporary files.
    homes = FOLDER / "homes"
    homes.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=homes) as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        path = f"{Path(node()).parent}:{os.environ['PATH']}"
        quiet = {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"}

        def use(url: str) -> str:
            said = act(url, work, quiet)
            made = work / "hello.txt"
            if not made.exists() or made.read_text() != "Cleave":
                raise AssertionError(f"{name} made no file; it said:\n{said[-3000:]}")
            if FINAL not in said:
                raise AssertionError(f"{name} did not end with the answer, but:\n{said[-3000:]}")
            return f"a command by a tool call, its result, and the answer, {API[name]}"

        return with_script(cleave, use, SCRIPTED / "agents.yaml")


def codex(cleave: str) -> str:
    """Runs OpenAI's Codex."""
    folder = npm("codex", [f"@openai/codex@{CODEX}"])

    def act(url: str, work: Path, quiet: dict[str, str]) -> str:
        settings = work.parent / "home" / ".codex"
        settings.mkdir()
        (settings / "config.toml").write_text(f"""
model = "{model_of(url)}"
model_provider = "cleave"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.cleave]
name = "Cleave"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")
        # The temporary folder is the sandbox: the kernel's may be missing in a container.
        command = [folder / "node_modules" / ".bin" / "codex", "exec", "--skip-git-repo-check",
                   "--dangerously-bypass-approvals-and-sandbox", TASK]
        return run(command, cwd=work, env=quiet)

    return with_agent(cleave, "Codex", act)


def opencode(cleave: str) -> str:
    """Runs opencode."""
    folder = npm("opencode", [f"opencode-ai@{OPENCODE}"])

    def act(url: str, work: Path, quiet: dict[str, str]) -> str:
        model = model_of(url)
        provider = {
            "npm": "@ai-sdk/openai-compatible", "name": "Cleave", "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {model: {"tool_call": True, "reasoning": True, "limit": {"context": 500_000, "output": 4000}}},
        }
        (work / "opencode.json").write_text(json.dumps({
            "autoupdate": False, "share": "disabled", "model": f"cleave/{model}", "small_model": f"cleave/{model}",
            "permission": {"bash": "allow"}, "provider": {"cleave": provider},
        }))
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        env = quiet | {f"OPENCODE_DISABLE_{name}": "1" for name in off}
        return run([folder / "node_modules" / ".bin" / "opencode", "run", TASK], cwd=work, env=env)

    return with_agent(cleave, "opencode", act)


def claude_code(cleave: str) -> str:
    """Runs Claude Code."""
    folder = npm("claude-code", [f"@anthropic-ai/claude-code@{CLAUDE_CODE}"])

    def act(url: str, work: Path, quiet: dict[str, str]) -> str:
        model = model_of(url)
        env = quiet | {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_TELEMETRY": "1",
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in ("OPUS", "SONNET", "HAIKU")},
        }
        command = [folder / "node_modules" / ".bin" / "claude", "--print", "--model", model, "--allowed-tools", "Bash", "--", TASK]
        return run(command, cwd=work, env=env)

    return with_agent(cleave, "Claude Code", act)


API = {"Codex": "by Responses", "opencode": "by chat completions", "Claude Code": "by Messages"}
AGENTS = {
    "Codex": (CODEX, codex),
    "opencode": (OPENCODE, opencode),
    "Claude Code": (CLAUDE_CODE, claude_code),
}
