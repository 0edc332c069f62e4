"""A hub on this machine that speaks the API of huggingface.co, for repositories that lie in a folder.

Large files are LFS: their address redirects to another host, which sends ranges, and must not be sent the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_of_the_test"
_LFS = (".gguf", ".safetensors", ".bin")


@dataclass
class StandInHub:
    """A server for `root/ORG/NAME/FILE`, and how it misbehaves.

    Attributes:
        gated: repositories that only `TOKEN` may read.
        breaks_after: bytes of each large file that are sent before the connection ends; None: all.
        flips: how many of the next large files have one wrong bit.
        ignores_ranges: whether a range is answered with the whole file, as some mirrors do.
        requests: method and path of each request, and the range that it asked for.
        leaked: requests that gave the token to the host of large files.
    """

    root: Path
    gated: set[str] = field(default_factory=set)
    breaks_after: int | None = None
    flips: int = 0
    ignores_ranges: bool = False
    has_lfs: bool = True
    requests: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def folder(self) -> Path:
        """The files of the repository `org/tiny`."""
        return self.root / "org" / "tiny"

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.port}"

    def bytes_sent(self) -> list[str]:
        """The requests for contents of large files."""
        return [request for request in self.requests if request.startswith("GET /cdn/")]

    @contextmanager
    def running(self) -> Iterator[StandInHub]:
        """Serve until the block ends."""
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer()

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        asked = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path}{f' {asked}' if asked else ''}")
        if path.startswith("/cdn/"):
            self._send_large(self.hub.root / path.removeprefix("/cdn/"), asked)
            return
        parts = path.removeprefix("/api/models").strip("/").split("/", 2)
        repository, rest = "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""
        folder = self.hub.root / repository
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if len(parts) < 2 or not folder.is_dir():
            self._refuse(401, "RepoNotFound")  # to those without a token, private and absent look the same
        elif repository in self.hub.gated and not allowed:
            self._refuse(401, "GatedRepo")
        elif rest.startswith("tree/"):
            self._send(json.dumps([self._entry(file, folder) for file in _files(folder)]).encode())
        elif rest.startswith("resolve/"):
            self._resolve(folder, rest.split("/", 2)[2])
        else:
            names = [{"rfilename": file.relative_to(folder).as_posix()} for file in _files(folder)]
            self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": names}).encode())

    def _entry(self, file: Path, folder: Path) -> dict[str, object]:
        content = file.read_bytes()
        entry = {"type": "file", "path": file.relative_to(folder).as_posix(), "size": len(content), "oid": "0" * 40}
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry | ({"lfs": lfs} if self._is_large(file) else {})

    def _is_large(self, file: Path) -> bool:
        return self.hub.has_lfs and file.suffix in _LFS

    def _resolve(self, folder: Path, name: str) -> None:
        file = folder / name
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = file.read_bytes()
        if not self._is_large(file):
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self._send(content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            return
        linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        where = f"http://localhost:{self.hub.port}/cdn/{file.relative_to(self.hub.root)}"
        self._send(b"", {"Location": where, "X-Repo-Commit": COMMIT, **linked}, 302)

    def _send_large(self, file: Path, asked: str | None) -> None:
        if self.headers.get("Authorization"):
            self.hub.leaked.append(self.path)
        whole = bytearray(file.read_bytes())
        size, begin = len(whole), 0
        if asked is not None and not self.hub.ignores_ranges:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
        if self.command == "GET" and self.hub.flips:
            self.hub.flips -= 1
            whole[-1] ^= 1
        content = bytes(whole[begin:])
        limit = len(content) if self.hub.breaks_after is None else self.hub.breaks_after
        headers = {"Content-Range": f"bytes {begin}-{size - 1}/{size}"} if begin else {}
        self._send(content, headers, 206 if begin else 200, limit)

    def _send(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200, limit: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:limit])
            if limit is not None and limit < len(content):
                self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": f"this is {code}"}, status)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
