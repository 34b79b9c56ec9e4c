"""Streams through a Service, and the outcome of each.

Owns: open-loop arrivals, and retries of requests without an answer. Never: takes an answer for whole that broke off, or
that differs from those of equal requests.
"""

import dataclasses
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "balancers"))
from stream import Request

# Seconds in which a request without an answer is retried, and seconds between two attempts.
PATIENCE = 60.0
AGAIN_AFTER = 0.3
VOCABULARY = 200


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests of one kind."""

    rate: float
    prompt_tokens: int
    answer_tokens: int


@dataclasses.dataclass
class Stream:
    """One request, with all its attempts."""

    began: float
    shape: Shape
    ended: float = 0.0
    # Statuses and errors of attempts that had no answer.
    refused: Counter = dataclasses.field(default_factory=Counter)
    lost: str = ""
    text: str = ""
    # Seconds to the first token, earlier attempts included.
    first: float = 0.0

    @property
    def whole(self) -> bool:
        return bool(self.ended) and not self.lost and bool(self.text)


class Load:
    """Streams at a rate, of `Shape`s that change; every stream has the same seed, so equal requests have equal
    answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.shapes: tuple[Shape, ...] = ()
        self.streams: list[Stream] = []
        self.random = random.Random(6)
        self.stopped = False
        threading.Thread(target=self._run, daemon=True).start()

    def shape(self, *shapes: Shape) -> None:
        self.shapes = shapes

    def _run(self) -> None:
        due: dict[Shape, float] = {}
        while True:
            now = time.monotonic()
            due = {shape: due.get(shape, now) for shape in self.shapes}
            for shape, at in due.items():
                if now >= at:
                    due[shape] = at + 1 / shape.rate
                    self.ask(shape)
            time.sleep(0.01)

    def ask(self, shape: Shape) -> Stream:
        stream = Stream(time.monotonic(), shape)
        self.streams.append(stream)
        # No two prompts begin alike, so no prefix is cached.
        prompt = [self.random.randrange(3, VOCABULARY) for _ in range(shape.prompt_tokens)]
        threading.Thread(target=self._follow, args=(stream, prompt), daemon=True).start()
        return stream

    def _follow(self, stream: Stream, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": stream.shape.answer_tokens, "stream": True, "temperature": 1.0}
        while True:
            tried = time.monotonic()
            answer = Request(self.address, body).join(PATIENCE + stream.shape.answer_tokens)
            if answer.status == 200:
                if not answer.whole:
                    stream.lost = repr(answer)
                elif answer.tokens != stream.shape.answer_tokens:
                    stream.lost = f"{answer.tokens} tokens of {stream.shape.answer_tokens}"
                stream.text = answer.text
                stream.first = tried - stream.began + (answer.events or [0.0])[0]
                break
            stream.refused[str(answer.status or answer.broken.split(":")[0])] += 1
            if time.monotonic() - stream.began > PATIENCE:
                stream.lost = f"never begun: {dict(stream.refused)}"
                break
            time.sleep(AGAIN_AFTER)
        stream.ended = time.monotonic()

    def since(self, begun: float, limit: float = 60.0) -> list[Stream]:
        """Returns the streams that were open after that moment, once all that are open now have ended."""
        mine = [one for one in list(self.streams) if not one.ended or one.ended >= begun]
        until = time.monotonic() + limit
        while not all(one.ended for one in mine):
            if time.monotonic() > until:
                raise AssertionError(f"{sum(not one.ended for one in mine)} streams have not ended within {limit} s")
            time.sleep(0.05)
        return mine

    def judge(self) -> None:
        """Marks streams as lost whose text differs from that of most streams of their shape."""
        said: dict[Shape, Counter] = {}
        whole = [one for one in self.streams if one.whole]
        for one in whole:
            said.setdefault(one.shape, Counter())[one.text] += 1
        for one in whole:
            if one.text != said[one.shape].most_common(1)[0][0]:
                one.lost = f"other tokens: {one.text[:60]!r}"


def told(streams: list[Stream]) -> str:
    """Returns a cell of the table about these streams."""
    lost = [one for one in streams if one.lost]
    again = sum((one.refused for one in streams), Counter())
    slowest = max((one.first for one in streams), default=0.0)
    text = f"{len(streams)} streams, {len(lost)} lost, slowest first token {slowest:.1f} s"
    return f"{text}; tried again: {', '.join(f'{count} × {why}' for why, count in again.items())}" if again else text
