"""The protocol of `cleave bench engine --stdin`, for engines that are asked from Python.

Reads `prefill:TOKENS` and `decode:SEQUENCESxCONTEXT`, a shape a line, and answers each with {"tokens_per_second": …},
any other line with {"shape": …, "why": …}; before them {"ready": true}, once the engine has run something. Each shape
runs once untimed first, so that preparation for a shape does not count, nor the time in which the engine was stopped.
"""

import json
import re
import sys
from collections.abc import Callable


def answer(prefill: Callable[[int], float], decode: Callable[[int, int], float | None]) -> None:
    """Answers until the input ends. Both functions return tokens per second, or nothing for a shape that cannot run,
    and draw new prompts each time."""
    prefill(64)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        shape = re.fullmatch(r"prefill:(\d+)|decode:(\d+)x(\d+)", line.strip())
        if not shape:
            why = "neither prefill:TOKENS nor decode:SEQUENCESxCONTEXT"
            print(json.dumps({"shape": line.strip(), "why": why}), flush=True)
            continue
        numbers = [int(number) for number in shape.groups() if number]
        run = decode if shape[2] else prefill
        run(*numbers)
        print(json.dumps({"tokens_per_second": run(*numbers)}), flush=True)
