"""Load generators of other projects, each for one measurement of goodput.

Owns: the installation and the call of each, and the place of the good requests in its report. Never: judges the
numbers, which are those of mock engines.
"""

import json
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

from tools import FOLDER, ROOT, run, venv

AIPERF, INFERENCE_PERF, SGLANG = "0.13.0", "0.7.0", "0.5.23"
# The tokenizer is the bundled checkpoint's, which the routers count with.
TOKENIZER = ROOT / "assets" / "demo"
MODEL = "cleave-demo"
REQUESTS, RATE = 60, 10
TTFT_MS, TPOT_MS = 500, 50
NEW_PYTHON = (3, 12)
# SGLang's tool imports these; the rest of its package is not needed.
BENCH_NEEDS = ("aiohttp", "msgspec", "orjson", "numpy", "requests", "tqdm", "transformers", "pillow", "pybase64", "datasets",
               "pyzmq", "psutil")


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"} | more


def aiperf(url: str) -> str:
    """Runs NVIDIA's aiperf."""
    python = venv("aiperf", [f"aiperf=={AIPERF}"], NEW_PYTHON)
    with tempfile.TemporaryDirectory() as out:
        env = environment()
        # The tool refuses a local tokenizer, too, if this variable is set.
        env.pop("HF_HUB_OFFLINE", None)
        run([
            python.parent / "aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
            "--request-rate", RATE, "--request-count", REQUESTS, "--synthetic-input-tokens-mean", "64",
            "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", "16", "--tokenizer", TOKENIZER, "--ui", "none",
            "--artifact-dir", out, "--no-gpu-telemetry", "--no-server-metrics",
            "--goodput", f"time_to_first_token:{TTFT_MS} inter_token_latency:{TPOT_MS}",
        ], cwd=out, env=env)
        report = json.loads(next(Path(out).rglob("profile_export_aiperf.json")).read_text())
    count, good = report["request_count"]["avg"], report["good_request_count"]["avg"]
    if count != REQUESTS or not good:
        raise AssertionError(f"{good} of {count} requests were good")
    return f"chat, streamed, {RATE} requests/s through nginx: {good:.0f} of {count:.0f} within {TTFT_MS} ms and {TPOT_MS} ms"


def inference_perf(url: str) -> str:
    """Runs the Kubernetes project's inference-perf."""
    python = venv("inference-perf", [f"inference-perf=={INFERENCE_PERF}"], NEW_PYTHON)
    seconds = REQUESTS // RATE
    config = {
        "load": {"type": "poisson", "stages": [{"rate": RATE, "duration": seconds}]},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(TOKENIZER)},
        "data": {
            "type": "random",
            "input_distribution": {"min": 64, "max": 64, "mean": 64, "std_dev": 0, "total_count": REQUESTS * 2},
            "output_distribution": {"min": 16, "max": 16, "mean": 16, "std_dev": 0, "total_count": REQUESTS * 2},
        },
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": False}},
    }
    with tempfile.TemporaryDirectory() as out:
        config["storage"] = {"local_storage": {"path": out}}
        path = Path(out) / "config.yml"
        # The tool reads YAML, and every JSON text is YAML.
        path.write_text(json.dumps(config))
        run([python.parent / "inference-perf", "--config_file", path], cwd=out, env=environment(HF_HUB_OFFLINE="1"))
        report = json.loads(next(Path(out).rglob("summary_lifecycle_metrics.json")).read_text())
    good, bad = report["successes"]["count"], report["failures"]["count"]
    if bad or not good:
        raise AssertionError(f"{good} requests done, {bad} failed")
    ttft = report["successes"]["latency"]["time_to_first_token"]["p90"] * 1e3
    tpot = report["successes"]["latency"]["time_per_output_token"]["p90"] * 1e3
    return (f"completions, streamed, Poisson {RATE} requests/s through nginx: {good} done, none failed, p90 of "
            f"TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms")


def bench_serving(url: str) -> str:
    """Runs SGLang's bench_serving, without SGLang itself."""
    python = venv("sglang", BENCH_NEEDS, NEW_PYTHON)
    package = FOLDER / "sglang" / "tool"
    if not package.is_dir():
        unpack(python, package)
    host, port = url.removeprefix("http://").split(":")
    with tempfile.TemporaryDirectory() as out:
        said = run([
            python, "-m", "sglang.bench_serving", "--backend", "vllm-chat", "--host", host, "--port", port, "--model", MODEL,
            "--tokenizer", TOKENIZER, "--dataset-name", "random-ids", "--num-prompts", REQUESTS, "--request-rate", RATE,
            "--random-input-len", "64", "--random-output-len", "16", "--random-range-ratio", "1", "--seed", "1",
            "--goodput", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}", "--output-file", Path(out) / "out.jsonl",
        ], cwd=out, env=environment(PYTHONPATH=str(package)))
    done = int(re.search(r"Successful requests:\s+(\d+)", said).group(1))
    good = float(re.search(r"[Gg]oodput[^\n]*?([\d.]+)\s*$", said, re.MULTILINE).group(1))
    if done != REQUESTS or good <= 0:
        raise AssertionError(said[-2000:])
    return f"chat, streamed, {RATE} requests/s through nginx: {done} of {REQUESTS} done, goodput {good:.2f} requests/s"


def unpack(python: Path, package: Path) -> None:
    """Takes from the wheel the tool and its imports; of one module, which imports torch, only a constant."""
    wheels = FOLDER / "sglang" / "wheel"
    if not list(wheels.glob(f"sglang-{SGLANG}*.whl")):
        run([python, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, f"sglang=={SGLANG}"])
    wanted = ("sglang/benchmark/", "sglang/bench_serving.py", "sglang/srt/utils/network.py", "sglang/srt/disaggregation/utils.py")
    with zipfile.ZipFile(next(wheels.glob("sglang-*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.startswith(wanted)]
        wheel.extractall(package, names)
    shutil.rmtree(wheels)
    for folder in ("", "srt", "srt/utils", "srt/disaggregation"):
        (package / "sglang" / folder / "__init__.py").touch()
    module = package / "sglang" / "srt" / "disaggregation" / "utils.py"
    constants = [line for line in module.read_text().splitlines() if re.match(r"FAKE_BOOTSTRAP_HOST\s*=", line)]
    module.write_text("\n".join(constants) + "\n")
