"""A newcomer at a fresh clone: an empty HOME, what `make run` has made, and nothing to type but what the pages show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..goldens import tiny_gguf
from ..goldens.families import FAMILIES
from ..serve_process import free_port

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
MOST_LINES = 10  # of code that a step may take
ANSWERS_WITHIN_S = 120.0
ENDS_WITHIN_S = 1200.0
_PORT = "8000"  # in the pages
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


@dataclass(frozen=True)
class Clone:
    """A fresh clone in which `make run` has been typed, and what that said."""

    path: Path
    said: str

    def shown_line(self, beginning: str, page: str = README) -> str:
        """Return the line of a page's commands that begins so, as it would be copied."""
        lines = [line for block in self._blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
        found = [line for line in lines if line.startswith(beginning)]
        assert found, f"{page} does not show {beginning!r}"
        return found[0]

    def shown_code(self, holding: str, page: str = README) -> str:
        """Return the Python on a page that holds a text."""
        found = [block for block in self._blocks(page, "python") if holding in block]
        assert len(found) == 1, f"{page} shows {holding!r} {len(found)} times"
        return found[0]

    def _blocks(self, page: str, language: str) -> list[str]:
        text = (self.path / page).read_text(encoding="utf-8")
        return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@dataclass
class Newcomer:
    """Someone with a home of their own, who types one command at a time in one folder.

    Their servers listen on `port` where the pages say 8000.
    """

    clone: Clone
    home: Path
    port: int
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where they type."""
        return self.home / "work"

    @property
    def url(self) -> str:
        """Of a server that they have started."""
        return f"http://127.0.0.1:{self.port}"

    def types(self, command: str, answers: str = "") -> str:
        """Type one command, and lines for its input. Returns what it prints; it must succeed at the first try."""
        assert len(command.splitlines()) == 1, command
        done = subprocess.run(
            ["sh", "-c", self._here(command)],
            input=answers,
            capture_output=True,
            text=True,
            check=False,
            timeout=ENDS_WITHIN_S,
            **self._place(),
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def runs(self, code: str) -> str:
        """Run a short script. Returns what it prints; it must succeed at the first try."""
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES, f"{len(lines)} lines are no short script:\n{code}"
        (self.folder / "script.py").write_text(self._here(code), encoding="utf-8")
        return self.types("python script.py")

    @contextmanager
    def serving(self, command: str) -> Iterator[Served]:
        """Type a command that serves until it is stopped, in a second terminal; gives it once it is ready."""
        log = self.home / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {self._here(command)}"], stdout=file, stderr=file, **self._place()
            )
        served = Served(self.url, process, log)
        try:
            served.wait_until_ready()
            yield served
        finally:
            process.terminate()
            process.wait(60)

    def _here(self, text: str) -> str:
        return text.replace(_PORT, str(self.port))

    def _place(self) -> dict[str, Any]:
        """Kernels and downloads are shared with the machine's user, and nothing else."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        own = {
            "PATH": f"{self.clone.path / '.venv' / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "RADIXLM_KERNEL_CACHE": os.environ.get("RADIXLM_KERNEL_CACHE", str(_CACHE / "radixlm" / "kernels")),
            "RADIXLM_PORT": str(self.port),
        }
        return {"cwd": self.folder, "env": {**kept, **own, **self.variables}}


@dataclass(frozen=True)
class Served:
    """A server that was started, with what it has said."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        """The lines so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until_said(self, text: str) -> str:
        """Return the lines so far once `text` is in them: a server answers before it has said all."""
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while text not in self.said:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return self.said

    def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        """Return the status of a browser's GET, 0 if nothing listens, and the body."""
        headers = {"Accept": "text/html, */*"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers)) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def asks(self, messages: list[dict[str, str]], **fields: Any) -> Any:
        """Return the answer to a chat."""
        body = json.dumps({"messages": messages, "max_tokens": 8, **fields}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def wait_until_ready(self) -> None:
        """Return once `/health` is 200. Until then it must answer, too, from the first moment."""
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        has_answered = False
        while (status := self.get("/health")[0]) != 200:
            if has_answered and status == 0:  # the server that tells how far it is had accepted it when it ended
                status = self.get("/health")[0]
            has_answered |= status == 503
            assert status in (0, 200, 503), status
            assert not (has_answered and status == 0), "it listens no more"
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.1)


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """What a newcomer has after `git clone` and README's first command."""
    folder = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "radixlm"], check=True)
    clone = Clone(folder / "radixlm", "")
    home = folder / "home"
    home.mkdir()
    shared = {"RADIXLM_KERNEL_CACHE": str(_CACHE / "radixlm" / "kernels"), "PIP_CACHE_DIR": str(_CACHE / "pip")}
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_")) or name == "PATH"}
    done = subprocess.run(
        ["sh", "-c", clone.shown_line("make run")],
        input="hi, who are you?\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=ENDS_WITHIN_S,
        cwd=clone.path,
        env={**shared, **kept, "HOME": str(home)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Clone(clone.path, done.stdout + done.stderr)


@pytest.fixture
def newcomer(clone: Clone, tmp_path: Path) -> Newcomer:
    """Someone in an empty home. Their folder has a model, as an artifact and, much smaller, as a file."""
    found = Newcomer(clone, tmp_path / "home", free_port())
    found.folder.mkdir(parents=True)
    (found.folder / "smollm2.radixlm").symlink_to(os.environ["RADIXLM_ARTIFACT"])
    tiny_gguf.write(FAMILIES["qwen3"], found.folder / "model.gguf")
    shutil.copytree(clone.path / "examples", found.folder / "examples")
    return found
