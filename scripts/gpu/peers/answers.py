"""The answers of a peer to `turns.py`: a line of JSON when the peer is ready, then one for every shape.

Standard library only.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable

# Answers go to the original standard output; all that libraries print goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(**fields: object) -> None:
    ANSWERS.write(json.dumps(fields) + "\n")
    ANSWERS.flush()


def serve(load_seconds: float, prefill: Callable[[int], list[float]], decode: Callable[[int, int], list[float]]) -> None:
    """Answers shapes: `prefill(tokens)` gives seconds of prompts, `decode(batch, context)` of steps; both may raise."""
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
        except Exception as error:  # Any error of a library is reported, since another shape may still work.
            traceback.print_exc()
            say(shape=shape, why=f"{type(error).__name__}: {error}"[:300])
