"""Workloads of goodput.py: four quadrants and two shapes of traces, in lengths that suit the model's speed.

The long prompt takes the fastest peer a quarter of a second or so, the long answer half a second alone;
the short ones are an eighth of that. (Otherwise a minute of one system at one rate would hold a handful
of requests, and nothing could be said.) Traces keep their mixture of lengths, their order and, in the
Azure-shaped one, their times; their mean lengths are stretched to those given here.
"""

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

# Mean prompt and answer, (short, long) each, by the model's number of parameters in millions at most.
LENGTHS = {400: ((32, 256), (8, 64)), 4000: ((16, 96), (4, 16))}


@dataclass
class Workload:
    name: str
    # Means that the schedule tends to, in tokens.
    input: int
    output: int
    # None for a synthetic workload.
    trace: Path | None = None
    arrivals: str | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0

    def arguments(self, cell: Path, requests: int, seed: int) -> list[str]:
        """Flags of `cleave bench run`, the same for every system. The seed chooses the part of a trace."""
        if self.trace is None:
            return ["--workload", f"{self.name}:input={self.input},output={self.output}"]
        part = cell.parent / f"trace-{self.name}-{seed}-{requests}{'.csv' if '.csv' in self.trace.name else '.jsonl'}"
        if not part.exists():
            part.write_text(window(self.trace, requests, seed))
        scales = ["--input-scale", f"{self.input_scale:.5f}", "--output-scale", f"{self.output_scale:.5f}"]
        arrivals = ["--arrivals", self.arrivals] if self.arrivals else []
        return ["--trace", str(part), *scales, *arrivals]


# Lines before the end of a trace in which no part begins, so that any number of requests begins at the same place.
ROOM = 1000


def lines(path: Path) -> list[str]:
    reader = gzip.open if path.suffix == ".gz" else open
    with reader(path, "rt") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def window(path: Path, requests: int, seed: int) -> str:
    """Consecutive requests of a trace, from a random place on."""
    all_lines = lines(path)
    head = [] if all_lines[0].startswith("{") else [all_lines.pop(0)]
    start = random.Random(seed).randrange(max(1, len(all_lines) - ROOM))
    return "\n".join(head + all_lines[start : start + requests]) + "\n"


def means(path: Path) -> tuple[float, float]:
    pairs = []
    for line in lines(path):
        if line.startswith("{"):
            row = json.loads(line)
            pairs.append((row["input_length"], row["output_length"]))
        elif line[:1].isdigit():
            pairs.append(tuple(int(cell) for cell in line.split(",")[1:3]))
    return sum(pair[0] for pair in pairs) / len(pairs), sum(pair[1] for pair in pairs) / len(pairs)


def workloads(million_parameters: float, mooncake: Path | None, azure: Path | None) -> list[Workload]:
    size = next((size for size in sorted(LENGTHS) if million_parameters <= size), max(LENGTHS))
    inputs, outputs = LENGTHS[size]
    names = ("short", "long")
    found = [
        Workload(f"{names[i]}-{names[o]}", inputs[i], outputs[o]) for i in range(2) for o in range(2)
    ]
    # Mooncake's stamps lie on ticks of three seconds, which no user makes: its requests come as a Poisson
    # process. Its prompts are long, Azure's chats are between the quadrants.
    shapes = [("mooncake", mooncake, inputs[1], outputs[1] // 2, "poisson")]
    shapes += [("azure", azure, inputs[1] // 2, outputs[1] // 2, None)]
    for name, path, prompt, answer, arrivals in shapes:
        if path is not None:
            mean_input, mean_output = means(path)
            scales = (prompt / mean_input, answer / mean_output)
            found.append(Workload(name, prompt, answer, path, arrivals, *scales))
    return found
