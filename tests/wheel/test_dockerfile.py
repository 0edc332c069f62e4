"""The Dockerfile is linted, its steps run in clean folders, and what they install is healthy once it serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..serve_process import free_port
from .conftest import ROOT, STARTS_WITHIN_S, TOOLS

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
PROGRAMS = ("sh", "install")  # of the base image, beside Python


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a tracked file into the build."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(path == one or path.startswith(f"{one}/") for one in allowed)


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([TOOLS / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_two_stages_end_with_a_user_that_is_not_root() -> None:
    assert len(instructions("FROM")) == 2
    [user] = instructions("USER")
    assert "0" not in user.split(":")
    assert DOCKERFILE.index("USER") > DOCKERFILE.rindex("FROM")


class Image:
    """What the steps make, under a folder in place of the root of a file system."""

    def __init__(self, folder: Path, distribution: str) -> None:
        self._folder = folder
        (folder / "bin").mkdir(parents=True)
        for program in PROGRAMS:
            (folder / "bin" / program).symlink_to(str(shutil.which(program)))
        (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for path in filter(in_context, tracked.stdout.splitlines()):
            (folder / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / "src" / path)
        self.environment = {"PATH": str(folder / "bin"), "DISTRIBUTION": distribution}
        for step in instructions("RUN"):
            self.run("sh", "-c", self.placed(step))
        for assignment in re.findall(r"(\w+)=(\S+)", " ".join(instructions("ENV"))):
            name, value = assignment
            self.environment[name] = self.placed(value).replace("$PATH", self.environment["PATH"])

    def placed(self, text: str) -> str:
        """Text with the image's folders where they are here."""
        return re.sub(r"(?<![\w.])/(build|opt|cache)\b", rf"{self._folder}/\1", text)

    def run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._folder / "src", env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def is_healthy(self, port: int) -> bool:
        [check] = re.findall(r"CMD (\[.*\])", instructions("HEALTHCHECK")[0])
        command = [word.replace("8000", str(port)) for word in json.loads(check)]
        return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", params=["radixlm", "radixlm-serve"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield Image(tmp_path_factory.mktemp("image") / "root", request.param)


def test_what_the_steps_install_is_healthy_once_it_serves(image: Image, tiny_artifact: Path) -> None:
    port = free_port()
    [entry], default = (json.loads(instructions(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    here = {"smollm2": str(tiny_artifact), "0.0.0.0": "127.0.0.1", "8000": str(port)}
    words = [here.get(word, word) for word in default]
    assert not image.is_healthy(port)
    server = subprocess.Popen([entry, *words], env=image.environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not image.is_healthy(port):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.2)
    finally:
        server.terminate()
        assert server.wait(60) is not None
