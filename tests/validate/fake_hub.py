"""A Hub on this machine: enough of its API for one commit of small files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was asked of it. files: the content of the last commit, by name."""

    url: str = ""
    repos: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(("POST", self.path))
            status, answer = _answer(hub, self.path, body)
            self._send(status, answer)

        def do_GET(self) -> None:
            hub.requests.append(("GET", self.path))
            self._send(404, {"error": "nothing here"})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _answer(hub: Hub, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    if path == "/api/repos/create":
        asked = json.loads(body)
        hub.created.append(asked)
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        hub.repos.add(repo)
        return 200, {"url": f"{hub.url}/{repo}"}
    repo = "/".join(path.split("/")[3:5])
    if repo not in hub.repos:
        return 404, {"error": "Repository not found"}
    if "/preupload/" in path:  # everything is small enough for the commit itself
        files = [
            {**one, "uploadMode": "regular", "shouldIgnore": False}
            for one in json.loads(body)["files"]
        ]
        return 200, {"files": files}
    if "/commit/" in path:
        for line in body.decode().splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                hub.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        return 200, {"commitUrl": f"{hub.url}/{repo}/commit/1", "commitOid": "1" * 40}
    return 404, {"error": path}
