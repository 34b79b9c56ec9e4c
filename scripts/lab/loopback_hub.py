"""A hub of models on loopback: the routes that cleave and Python's huggingface_hub use, over the files of a folder."""

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections import Counter
from pathlib import Path

NAME, COMMIT = "org/tiny", "a" * 40
LARGE_BYTES = 60_000


def checksum(content: bytes) -> str:
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """The routes that both clients use, over the files of a folder."""

    files: dict[str, bytes] = {}
    downloads: Counter = Counter()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = urllib.parse.urlparse(self.path).path
        if path.startswith(f"/api/models/{NAME}/revision/"):
            return self.answer_json({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": self.entries("rfilename", "blobId")})
        if path.startswith(f"/api/models/{NAME}/tree/"):
            return self.answer_json([{"type": "file"} | one for one in self.entries("path", "oid")])
        file = path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]
        if file not in self.files:
            return self.answer(404, b"", {"x-error-code": "EntryNotFound"})
        content = self.files[file]
        self.downloads[file] += self.command == "GET"
        return self.answer(200, content, {"etag": f'"{checksum(content)}"', "x-repo-commit": COMMIT})

    do_HEAD = do_GET

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), {"content-type": "application/json"})

    def entries(self, name: str, blob: str) -> list[dict]:
        found = []
        for path, content in self.files.items():
            one = {name: path, "size": len(content), blob: checksum(content)}
            if len(content) >= LARGE_BYTES:
                digest = checksum(content)
                one |= {blob: COMMIT, "lfs": {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 130}}
            found.append(one)
        return found


def start(folder: Path) -> str:
    """Serves the files of a folder as the model NAME, for as long as the process runs. Returns the hub's address."""
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    Hub.files.pop("goldens.json", None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
