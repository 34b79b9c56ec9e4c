"""Engines on the same processor, model and shapes, without servers, by turns: docs/benchmarks/engines-cpu.md.

usage: engines.py --cleave BIN --model HF_FOLDER [--int8 HF_FOLDER] [--llama FOLDER --gguf FILE] [--vllm FOLDER]
                  [--openvino FOLDER] [--mistralrs FOLDER] [--transformers] [--only NAME...] [--rounds 3] [--threads N]
                  [--shapes SHAPE...] [--kv-cache 2GiB] [--out FILE [--go-on]] [--table FILE]

The install scripts beside this file make the FOLDERs. The model is one that to_gguf.py knows, in bf16 (`cleave synth`),
--int8 the same as compressed-tensors W8A8 (`cleave synth --quantization int8`), --gguf the file that to_gguf.py makes
of it; f16, q8_0 and q4_0 are made beside it for the engines that read them. A model that is quantised already, as a
gpt-oss in MXFP4, is measured by Cleave and llama.cpp in its own format alone. Every engine is loaded once and stopped
(SIGSTOP) while another one is asked; llama.cpp is started for each sample. In each round every engine is asked for
every shape once, in an order that rotates; before each sample the machine must be quiet: no more than a tenth of its
cores busy for a second, or the sample waits for up to a minute.

No engine's first run of a shape counts. Cleave runs a prompt untimed the first time that it is asked for its length,
and four steps untimed before the 32 of every decode sample. Engines asked from Python run the whole shape untimed
before each sample (shapes.py). llama-bench warms up with the whole prompt, but with one token only before decoding, and
llama-batched-bench with 16 tokens: of both decoding is measured twice in one process, and the second counts.

Cleave's samples come with the floor that `cleave bench engine` reckons from ceilings measured beside them. Printed: the
best of the rounds, and the median, and below the fraction of its floor that the best had, and the median of all; --out
and --table are written after each shape of a round.

All engines are in memory at the same time. Where that is too much, --only takes some, by the beginning of their names,
in quotes where these have spaces; with --go-on and the same --out the others follow:
  engines.py ... --transformers --only "Cleave bf16" transformers
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
NAMES = {
    "prefill:512": "prefill 512",
    "prefill:2048": "prefill 2048",
    "decode:1x128": "decode b1, ctx 128",
    "decode:1x1024": "decode b1, ctx 1024",
    "decode:8x128": "batch 8",
    "decode:32x128": "batch 32",
}
SHAPES = list(NAMES)
CONTEXT, SEQUENCES = 2304, 32
QUIET_SHARE, QUIET_WAIT_SECONDS = 0.1, 60
# Field of a sample, which is one round to Cleave.
FRACTION = "fraction_of_floor_best"
# Errors of an engine that ends or answers with something else.
FAULTS = (RuntimeError, OSError, subprocess.CalledProcessError, ValueError, KeyError, IndexError)


@dataclass
class Engine:
    """An engine that answers shapes on its standard input."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    # Form of the model's GGUF file, for engines that read one.
    form: str | None = None
    process: subprocess.Popen | None = None

    def start(self, log: Path) -> None:
        environment = {name: value for name, value in (os.environ | self.environment).items() if value}
        with open(log / f"{self.name.replace(' ', '-')}.log", "w") as errors:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
            )
        self.read()
        self.signal(signal.SIGSTOP)

    def read(self) -> dict:
        assert self.process and self.process.stdout
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):
                if isinstance(found := json.loads(line), dict):
                    return found
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}; its log says why")

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        os.killpg(self.process.pid, number)

    def ask(self, shape: str) -> dict:
        assert self.process and self.process.stdin
        self.signal(signal.SIGCONT)
        self.process.stdin.write(shape + "\n")
        self.process.stdin.flush()
        found = self.read()
        self.signal(signal.SIGSTOP)
        return found

    def stop(self) -> None:
        if self.process:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.wait()


@dataclass
class Llama:
    """llama.cpp, whose programs measure and end."""

    name: str
    folder: str
    gguf: str
    form: str
    threads: int

    def start(self, log: Path) -> None:
        """Reads the file once, so that no sample waits for a disk."""
        subprocess.run(["cat", self.gguf], stdout=subprocess.DEVNULL, check=True)

    def ask(self, shape: str) -> dict:
        kind, rest = shape.split(":")
        numbers = [int(number) for number in rest.split("x")]
        common = ["-m", self.gguf, "-t", str(self.threads), "-fa", "1"]
        if kind == "prefill" or numbers[0] == 1:
            # llama-bench warms up with the whole prompt, but with one token only before it decodes.
            whole = ["-p", rest, "-n", "0", "-r", "1"]
            of = whole if kind == "prefill" else ["-p", "0", "-n", "32", "-d", str(numbers[1]), "-r", "2"]
            command = [f"{self.folder}/llama-bench", *common, "-o", "json", *of]
            rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            return {"tokens_per_second": rows[-1]["samples_ts"][-1]}
        count, context = numbers
        command = [f"{self.folder}/llama-batched-bench", *common, "-c", str(count * (context + 64)), "-b", "2048"]
        # The shape runs twice, and the second run counts.
        command += ["-npp", str(context), "-ntg", "32", "-npl", f"{count},{count}", "--output-format", "jsonl"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {"tokens_per_second": rows[-1]["speed_tg"]}

    def stop(self) -> None:
        """Does nothing: no process runs between samples."""


def engines(args: argparse.Namespace) -> list[Engine | Llama]:
    threads = str(args.threads)
    cleave = [args.cleave, "bench", "engine", "--threads", threads, "--stdin", "--rounds", "1", "--dtype", "bf16"]
    cleave += ["--max-model-len", str(CONTEXT), "--kv-cache", args.kv_cache, "--model", args.model]
    own = own_format(args.model)
    found: list[Engine | Llama] = [Engine(f"Cleave {own or 'bf16'}", cleave)]
    for form in () if own else ("int8", "int4"):
        found.append(Engine(f"Cleave {form}", [*cleave, "--quantize", form]))
    if args.llama:
        for form in (own,) if own else ("bf16", "q8_0", "q4_0"):
            found.append(Llama(f"llama.cpp {form}", args.llama, gguf(args, form), form, args.threads))
    if args.vllm:
        folder = Path(args.vllm)
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "LD_PRELOAD": (folder / "preload").read_text().strip(),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        program = [str(folder / "venv/bin/python"), str(HERE / "speed_vllm.py")]
        for form, model in (("bf16", args.model), ("w8a8", args.int8)):
            if model:
                found.append(Engine(f"vLLM {form}", [*program, model, str(CONTEXT), str(SEQUENCES)], environment))
    if args.openvino:
        program = [str(Path(args.openvino) / "bin/python"), str(HERE / "speed_openvino.py")]
        # The engine's reader of these files does not know bf16.
        for form in ("f16", "q8_0", "q4_0"):
            found.append(Engine(f"OpenVINO {form}", [*program, gguf(args, form), str(SEQUENCES), threads], form=form))
    if args.mistralrs:
        environment = {"RAYON_NUM_THREADS": threads, "CANDLE_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        program = [str(Path(args.mistralrs) / "bin/python"), str(HERE / "speed_mistralrs.py"), args.model, str(SEQUENCES)]
        # By default the engine computes in f32 on a processor, from f32 weights.
        for form in ("bf16", "f32", "q8_0", "q4k"):
            found.append(Engine(f"mistral.rs {form}", [*program, form], environment))
    if args.transformers:
        python = str(Path(args.vllm) / "venv/bin/python") if args.vllm else sys.executable
        found.append(Engine("transformers bf16", [python, str(HERE / "speed_transformers.py"), args.model, threads]))
    return found


def own_format(model: str) -> str | None:
    """The format of a model that is quantised already."""
    config = json.loads((Path(model) / "config.json").read_text())
    return config.get("quantization_config", {}).get("quant_method")


def gguf(args: argparse.Namespace, form: str) -> str:
    """The model's file in a form; --gguf has the model's own."""
    return args.gguf if form in ("bf16", own_format(args.model)) else args.gguf.removesuffix(".gguf") + f"-{form}.gguf"


def make_gguf(args: argparse.Namespace, form: str) -> None:
    """Makes the file of a form if it is not there; a file with the final name is whole."""
    out = gguf(args, form)
    if not Path(out).exists():
        command = [f"{args.llama}/llama-quantize", "--pure", args.gguf, out + ".part", form, str(args.threads)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(out + ".part", out)


def why(error: Exception) -> str:
    """The error, with the last words of a program that failed."""
    if isinstance(error, subprocess.CalledProcessError):
        last = (error.stderr or "").strip().splitlines()[-2:]
        return "; ".join([f"{Path(error.cmd[0]).name} ended with {error.returncode}", *last])
    return str(error) if isinstance(error, (RuntimeError, OSError)) else repr(error)


def busy_ticks() -> int:
    with open("/proc/stat") as lines:
        user, nice, system, _, _, interrupts, soft, stolen = (int(word) for word in lines.readline().split()[1:9])
    return user + nice + system + interrupts + soft + stolen


def wait_for_quiet() -> float:
    """Waits until no other process computes; returns the share of the cores that others still took."""
    for _ in range(QUIET_WAIT_SECONDS):
        before = busy_ticks()
        time.sleep(1)
        share = (busy_ticks() - before) / (os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1))
        if share <= QUIET_SHARE:
            break
    return share


Samples = dict[str, dict[str, list[dict]]]


def measure(found: list[Engine | Llama], rounds: int, shapes: list[str], samples: Samples) -> Iterator[Samples]:
    """Yields the samples after each shape of a round, together with the samples of earlier runs."""
    for engine in found:
        # A shape that failed before is tried again.
        samples.setdefault(engine.name, {}).pop("failed", None)
    first = max((len(of_engine.get(shapes[0], [])) for of_engine in samples.values()), default=0)
    for number in range(first, first + rounds):
        for shape in shapes:
            turn = number % len(found)
            for engine in found[turn:] + found[:turn]:
                if samples[engine.name].get("failed"):
                    continue
                share = wait_for_quiet()
                try:
                    sample = engine.ask(shape) | {"others": share}
                except FAULTS as error:
                    print(f"{engine.name}, {shape}: {why(error)}", file=sys.stderr)
                    samples[engine.name]["failed"] = [{"why": why(error)}]
                    continue
                sample.setdefault("tokens_per_second", sample.get("tokens_per_second_best"))
                samples[engine.name].setdefault(shape, []).append(sample)
                speed = sample["tokens_per_second"]
                said = sample.get("why", "no speed") if speed is None else f"{speed:.1f}"
                print(f"{time.strftime('%H:%M:%S')} {number} {engine.name:20} {shape:14} {said}", flush=True)
            yield samples


def of_floor(found: list[dict]) -> str:
    """Returns the fraction of its floor that the fastest sample had, and the median of those with one; nothing without
    a floor."""
    fastest = max(found, key=lambda sample: sample.get("tokens_per_second") or 0, default={})
    if fastest.get(FRACTION) is None:
        return ""
    fractions = [sample[FRACTION] for sample in found if sample.get(FRACTION) is not None]
    return f"{fastest[FRACTION]:.2f} ({statistics.median(fractions):.2f})"


def table(samples: Samples) -> str:
    """The table of all shapes that some engine was asked for."""
    asked = [shape for shape in SHAPES if any(shape in of_engine for of_engine in samples.values())]
    lines = ["| best (median), tokens/s | " + " | ".join(NAMES[shape] for shape in asked) + " |", "|---|" + "---|" * len(asked)]
    most = {shape: {} for shape in asked}
    for engine, shapes in samples.items():
        for shape in asked:
            if speeds := [sample["tokens_per_second"] for sample in shapes.get(shape, []) if sample["tokens_per_second"]]:
                most[shape][engine] = max(speeds), statistics.median(speeds)
    for engine, shapes in samples.items():
        cells = []
        for shape in asked:
            if engine not in most[shape]:
                cells.append("")
                continue
            best, median = most[shape][engine]
            text = f"{best:.0f} ({median:.0f})"
            cells.append(f"**{text}**" if best == max(found for found, _ in most[shape].values()) else text)
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
        floors = [of_floor(shapes.get(shape, [])) for shape in asked]
        if any(floors):
            lines.append("| of its floor then (median) | " + " | ".join(floors) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cleave", required=True)
    parser.add_argument("--model", required=True)
    for name in ("--int8", "--llama", "--gguf", "--vllm", "--openvino", "--mistralrs", "--out", "--table"):
        parser.add_argument(name)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, metavar="SHAPE")
    parser.add_argument("--kv-cache", default="2GiB", help="memory for keys and values of each Cleave")
    parser.add_argument("--go-on", action="store_true", help="add to the rounds that the file of --out has")
    parser.add_argument("--only", nargs="*", help="engines by the beginning of their names, in quotes where these have spaces")
    parser.add_argument("--log", default="target/peers", help="folder for what the engines say")
    args = parser.parse_args()
    if args.go_on and not args.out:
        parser.error("--go-on adds to the file of --out: name it")
    if args.out and Path(args.out).exists() and not args.go_on:
        parser.error(f"--out: {args.out} is there already: --go-on adds to it")
    for name in ("model", "int8", "llama", "gguf", "vllm", "openvino", "mistralrs"):
        path = getattr(args, name)
        if path and not Path(path).exists():
            parser.error(f"--{name}: there is no {path}")
    # Engines that are stopped do not end by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    before = {}
    if args.go_on:
        try:
            before = json.loads(Path(args.out).read_text())
        except (OSError, json.JSONDecodeError) as error:
            parser.error(f"--go-on: {args.out} has no rounds to go on from: {error}")
    if (args.llama or args.openvino) and not args.gguf:
        parser.error("llama.cpp and OpenVINO read the file of --gguf: name it (to_gguf.py makes it)")
    if args.openvino and not args.llama:
        parser.error("OpenVINO's files in narrower forms are made by llama-quantize: name llama.cpp's folder with --llama")
    log = Path(args.log)
    log.mkdir(parents=True, exist_ok=True)
    try:
        found = engines(args)
    except OSError as error:
        parser.error(str(error))
    for start in args.only or []:
        if not any(engine.name.startswith(start) for engine in found):
            parser.error(f"--only {start!r}: there are {', '.join(engine.name for engine in found)}")
    found = [engine for engine in found if not args.only or engine.name.startswith(tuple(args.only))]
    for form in dict.fromkeys(engine.form for engine in found if engine.form):
        try:
            make_gguf(args, form)
        except (OSError, subprocess.CalledProcessError) as error:
            parser.error(f"no {gguf(args, form)}: {why(error)}")
    try:
        for engine in list(found):
            print(f"starting {engine.name}", flush=True)
            try:
                engine.start(log)
            except FAULTS as error:
                print(f"left out: {engine.name}: {why(error)}", file=sys.stderr)
                engine.stop()
                found.remove(engine)
        if not found:
            sys.exit("no engine is left to measure")
        for samples in measure(found, args.rounds, args.shapes, before):
            if args.out:
                Path(args.out).write_text(json.dumps(samples, indent=1) + "\n")
            text = table(samples)
            if args.table:
                Path(args.table).write_text(text + "\n")
        print("\n" + text)
    finally:
        for engine in found:
            engine.stop()


if __name__ == "__main__":
    main()
