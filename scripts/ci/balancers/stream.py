"""One request over a socket, event by event, with the time of each.

Owns: the reading of an HTTP/1.1 answer as it arrives. Never: reports an answer that broke off as complete.
"""

import dataclasses
import http.client
import json
import threading
import time


@dataclasses.dataclass(repr=False)
class Answer:
    """The answer to a request, as far as it has arrived."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    sent: float = 0.0
    # Arrival of each event with a token, in seconds since the request was sent.
    events: list[float] = dataclasses.field(default_factory=list)
    # Tokens that had arrived with each event: a token of half a character has no event of its own.
    counts: list[int] = dataclasses.field(default_factory=list)
    # Text of all events, concatenated.
    text: str = ""
    comments: int = 0
    done: int = 0
    error: dict | None = None
    broken: str = ""
    ended: bool = False

    @property
    def tokens(self) -> int:
        """Returns the number of tokens, as the answer counts them."""
        return self.counts[-1] if self.counts else json.loads(self.body)["usage"]["completion_tokens"]

    def __repr__(self) -> str:
        said = self.body.decode(errors="replace")[:200] or f"{len(self.events)} events, {self.comments} comments"
        return f"<{self.status} {said} done={self.done} error={self.error} broken={self.broken!r} ended={self.ended}>"

    @property
    def whole(self) -> bool:
        """Whether the answer marks itself as complete, once."""
        return self.status == 200 and self.ended and not self.broken and self.error is None and self.done == 1

    @property
    def honest(self) -> bool:
        """Whether the answer is whole, or a client can tell that it is not."""
        return self.whole or bool(self.broken) or self.error is not None or self.status != 200


class Request:
    """A request to `/v1/completions` whose answer a thread of its own reads."""

    def __init__(self, address: str, body: dict, headers: dict[str, str] | None = None, timeout: float = 60.0) -> None:
        self.answer = Answer()
        self.connection = http.client.HTTPConnection(address, timeout=timeout)
        self.body = {"prompt": "A vector is", "ignore_eos": True, "seed": 1} | body
        if self.body.get("stream"):
            self.body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        self.headers = {"content-type": "application/json"} | (headers or {})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        answer = self.answer
        try:
            self.connection.connect()
            answer.sent = time.monotonic()
            self.connection.request("POST", "/v1/completions", json.dumps(self.body), self.headers)
            response = self.connection.getresponse()
            answer.headers = {name.lower(): value for name, value in response.getheaders()}
            answer.status = response.status
            if "event-stream" in answer.headers.get("content-type", ""):
                self._events(response)
            else:
                answer.body = response.read()
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            answer.broken = f"{type(error).__name__}: {error}"
        finally:
            answer.ended = True
            self.connection.close()

    def _events(self, response: http.client.HTTPResponse) -> None:
        answer = self.answer
        while line := response.readline():
            now = time.monotonic() - answer.sent
            if line.startswith(b":"):
                answer.comments += 1
            elif line.strip() == b"data: [DONE]":
                answer.done += 1
            elif line.startswith(b"data: "):
                said = json.loads(line[6:])
                if "error" in said:
                    answer.error = said["error"]
                elif said["choices"]:
                    answer.events.append(now)
                    answer.counts.append(said["usage"]["completion_tokens"])
                    answer.text += said["choices"][0]["text"]
        # readline() returns nothing at a broken chunk too.
        if response.chunked and response.chunk_left is not None:
            answer.broken = answer.broken or "the body broke off"

    def join(self, timeout: float = 60.0) -> Answer:
        self.thread.join(timeout)
        return self.answer

    def leave(self) -> None:
        """Closes the connection, as a client that is closed does."""
        sock = self.connection.sock
        if sock is not None:
            sock.shutdown(2)


def ask(address: str, body: dict, headers: dict[str, str] | None = None, timeout: float = 60.0) -> Answer:
    """Sends a request and reads its answer to the end."""
    return Request(address, body, headers, timeout).join(timeout)
