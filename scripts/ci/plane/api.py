"""The Kubernetes API by plain HTTPS and a token.

Owns: requests, and caches of lists that a watch keeps fresh. Never: hides an answer that is an error.
"""

import contextlib
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable

MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused; `status` is HTTP's."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said[:400]}")
        self.status = status


class Api:
    """An API server on loopback."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        # The server has just made its own certificate, on this machine's loopback, so no client can verify it.
        self.tls = ssl._create_unverified_context()
        self.local = threading.local()

    def _open(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, timeout=timeout)

    def ask(self, method: str, path: str, body: dict | None = None, kind: str = "application/json") -> dict:
        """Sends a request; returns the object of the answer. A connection closed in the meantime is opened again,
        once."""
        headers = {"authorization": f"Bearer {self.token}", "content-type": kind}
        text = None if body is None else json.dumps(body)
        for again in (False, True):
            connection = getattr(self.local, "connection", None)
            if connection is None:
                connection = self.local.connection = self._open(30)
            try:
                connection.request(method, path, text, headers)
                answer = connection.getresponse()
                said = answer.read().decode()
                break
            except (OSError, http.client.HTTPException):
                connection.close()
                self.local.connection = None
                if again:
                    raise
        if answer.status >= 300:
            raise ApiError(answer.status, said)
        return json.loads(said) if said.startswith("{") else {"text": said}

    def get(self, path: str) -> dict | None:
        """Returns the object, or None if it does not exist."""
        try:
            return self.ask("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def items(self, path: str) -> list[dict]:
        return self.ask("GET", path)["items"]

    def patch(self, path: str, body: dict) -> dict:
        return self.ask("PATCH", path, body, MERGE)

    def delete(self, path: str, **options: object) -> None:
        """Deletes an object; a missing one is no error."""
        with contextlib.suppress(ApiError):
            self.ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def events(self, path: str, version: str):
        """Yields changes as (type, object), until the server ends the watch."""
        connection = self._open(90)
        try:
            connection.request("GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=60",
                               headers={"authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            while line := answer.readline():
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            connection.close()


class Cache:
    """Objects of one list, kept current by a watch; `changed` is called after each change."""

    def __init__(self, api: Api, path: str, changed: Callable[[], None] = lambda: None) -> None:
        self.api, self.path, self.changed = api, path, changed
        self.objects: dict[tuple[str, str], dict] = {}
        self.lock = threading.Lock()
        threading.Thread(target=self._follow, daemon=True).start()

    def all(self) -> list[dict]:
        with self.lock:
            return list(self.objects.values())

    def find(self, namespace: str, name: str) -> dict | None:
        with self.lock:
            return self.objects.get((namespace, name))

    def _follow(self) -> None:
        while True:
            try:
                found = self.api.ask("GET", self.path)
                with self.lock:
                    self.objects = {_key(one): one for one in found["items"]}
                self.changed()
                for kind, one in self.api.events(self.path, found["metadata"]["resourceVersion"]):
                    if kind == "ERROR":
                        break
                    with self.lock:
                        if kind == "DELETED":
                            self.objects.pop(_key(one), None)
                        elif kind in ("ADDED", "MODIFIED"):
                            self.objects[_key(one)] = one
                    self.changed()
            except (OSError, http.client.HTTPException, ApiError, ValueError):
                # The server is starting, or ending.
                time.sleep(0.2)


def _key(one: dict) -> tuple[str, str]:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]
