"""How a peer written here answers `turns.py`: a line of JSON when it is ready, then one for every shape it is asked.

Standard library only.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable

# Answers go where standard output went at the start; whatever libraries print goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(**fields: object) -> None:
    ANSWERS.write(json.dumps(fields) + "\n")
    ANSWERS.flush()


def serve(load_seconds: float, prefill: Callable[[int], list[float]], decode: Callable[[int, int], list[float]]) -> None:
    """`prefill(tokens)` gives seconds of whole prompts, `decode(batch, context)` of single steps; both may raise."""
    say(load_seconds=load_seconds)
    for line in sys.stdin:
        shape = line.strip()
        kind, _, sizes = shape.partition(":")
        try:
            if kind == "prefill":
                seconds = prefill(int(sizes))
            else:
                seconds = decode(*map(int, sizes.split("x")))
            seconds = sorted(seconds)
            say(shape=shape, seconds_median=seconds[len(seconds) // 2], seconds_best=seconds[0])
        except Exception as error:  # Whatever a library raises: another shape may still work.
            traceback.print_exc()
            say(shape=shape, why=f"{type(error).__name__}: {error}"[:300])
