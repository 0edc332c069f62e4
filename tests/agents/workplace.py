"""Where a client is tried: a repository, a HOME with nothing in it, a scripted server, and no way out.

Standard library only: clients have environments of their own, in which radixlm is not installed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..serve_process import ServeProcess
from .task import make_repository

ROOT = Path(__file__).resolve().parents[2]
ENDS_WITHIN_S = 300.0
SERVE_OPTIONS = ("--kv-cache-gb", "0.03", "--max-num-seqs", "8")
SLACK = 1.01  # of what is computed, over the least possible


@dataclass(frozen=True)
class Asked:
    """One request that reached the model, as `scripted_server.py` notes it."""

    path: str
    prompt: str
    said: str
    why_not_more: str
    num_prompt: int
    num_cached: int
    least: int

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that the model was handed."""
        return self.num_prompt - self.num_cached


class Workplace:
    """Folders for one client, below `folder`, which is made anew."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.repository = make_repository(folder / "repository")
        self._folder = folder
        self.way_out = WayOut()

    def environment(self, **more: str) -> dict[str, str]:
        """What a client finds in its environment: a HOME of its own, and proxies that lead nowhere."""
        nowhere = self.way_out.url
        proxies = {
            name: nowhere for each in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (each, each.lower())
        }
        here = {name: "localhost,127.0.0.1" for name in ("NO_PROXY", "no_proxy")}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        # a file changed twice in a second may be run as it was before
        plain = {"HOME": str(self.home), "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**kept, **proxies, **here, **plain, **more}

    def serve(self, script: dict[str, Any], *command: str, api_key: str | None = None) -> ServeProcess:
        """The scripted server: `radixlm`, or what stands in for it, with these arguments."""
        (self._folder / "script.json").write_text(json.dumps(script))
        (self._folder / "requests.jsonl").touch()
        python = Path(os.environ["RADIXLM"]).parent / "python"
        scripted = [str(python), "-m", "tests.agents.scripted_server", *self._files()]
        return ServeProcess(
            *SERVE_OPTIONS,
            command=[*scripted, *command],
            log=self._folder / "server.log",
            api_key=api_key,
            environment={"HOME": str(self.home), "PYTHONPATH": str(ROOT)},
        )

    def asked(self) -> list[Asked]:
        """Every request so far that reached the model, in the order of their ends."""
        lines = (self._folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        return [
            Asked(
                noted["path"],
                noted["prompt"],
                noted["said"],
                noted["why_not_more"],
                noted["prompt_tokens"],
                noted["cached_tokens"],
                noted["least"],
            )
            for noted in map(json.loads, lines)
        ]

    def run(self, command: Sequence[str], environment: dict[str, str] | None = None, said: str = "") -> str:
        """What a client says, to which `said` is said; it runs in the repository.

        Raises:
            AssertionError: it fails.
        """
        with self.begun(command, environment, said) as client:
            return self.ended(client)

    def begun(
        self, command: Sequence[str], environment: dict[str, str] | None = None, said: str = ""
    ) -> subprocess.Popen[str]:
        """A client that runs in the repository, for `ended` to wait for. Some read all of `said` before they begin."""
        pipe, environ = subprocess.PIPE, environment or self.environment()
        with tempfile.TemporaryFile("w+") as file:
            file.write(said)
            file.seek(0)
            return subprocess.Popen(
                command, cwd=self.repository, env=environ, stdin=file, stdout=pipe, stderr=pipe, text=True
            )

    def ended(self, client: subprocess.Popen[str]) -> str:
        """As `run`, of a client that has begun."""
        try:
            out, errors = client.communicate(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            client.kill()
            raise
        assert client.returncode == 0, f"{out}\n{errors}"
        return out

    def _files(self) -> tuple[str, str]:
        return str(self._folder / "script.json"), str(self._folder / "requests.jsonl")


class WayOut:
    """A proxy that leads nowhere, and knows the `hosts` that were asked for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.hosts: set[str] = set()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with closing(connection):
                _, asked, *_ = (connection.recv(4096).decode(errors="replace") + " ?").split(" ")
                self.hosts.add(asked.removeprefix("http://").partition("/")[0].partition(":")[0])
                connection.sendall(b"HTTP/1.1 502 Nowhere\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def check_tokens(asked: Sequence[Asked], client: str) -> None:
    """Fail unless what was computed is at most 1.01 times the least possible, over all; print both for each request."""
    lines = [f"{client}: prompt, computed, least possible, and why not more"]
    lines += [f"{each.num_prompt:7} {each.num_computed:6} {each.least:6}  {each.why_not_more[:150]}" for each in asked]
    computed, least = sum(each.num_computed for each in asked), sum(each.least for each in asked)
    lines.append(f"{sum(each.num_prompt for each in asked):7} {computed:6} {least:6}  {computed / least:.4f} times")
    print("\n".join(lines), file=sys.stderr)
    assert computed <= SLACK * least, "\n".join(lines)
