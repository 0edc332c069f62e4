"""What is published, built and installed into clean environments, where the PATH has no compiler and no linker."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent  # of requirements-wheel.lock
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TINY_MODEL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.goldens.tiny_models import TINY_MODELS
TINY_MODELS["llama3"].write(Path(sys.argv[2]))
"""
STARTS_WITHIN_S = 120.0


@dataclass(frozen=True)
class Clean:
    """A virtual environment, and commands in it that find no other program."""

    path: Path

    def run(
        self, *command: object, ok: bool = True, input: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment to its end."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.path / "bin" / program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            input=input,
            env=self.environment,
            cwd=cwd or self.path,
        )
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done

    @property
    def environment(self) -> dict[str, str]:
        """Without PATH but for the environment's own programs; kernels are shared with the others."""
        return {
            **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))},
            "PATH": str(self.path / "bin"),
            "HOME": str(self.path),
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "RADIXLM_KERNEL_CACHE": str(self.path.parent.parent / "kernels"),
        }

    @property
    def packages(self) -> Path:
        """Where distributions are."""
        [found] = (self.path / "lib").glob("python*/site-packages")
        return found

    @contextmanager
    def serving(self, *arguments: object) -> Iterator[str]:
        """Run `radixlm serve` on a free port; gives the server's address once it is ready."""
        command = [str(self.path / "bin" / "radixlm"), "serve", *map(str, arguments), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=self.environment, cwd=self.path)
        try:
            said = ""
            for line in server.stderr or ():
                said += line
                if found := re.search(r"^serving .* at (\S+)/v1$", line):
                    yield found[1]
                    return
            pytest.fail(said)
        finally:
            server.terminate()
            server.wait(60)


def completion(url: str, prompt: str) -> str:
    """The text that a server continues a prompt with."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=STARTS_WITHIN_S) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def uv(*arguments: object) -> str:
    """What uv of this suite's environment prints. No interpreter is downloaded."""
    command = [str(TOOLS / "uv"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@functools.cache
def interpreter(version: str) -> str | None:
    """The path of a Python on this machine, of the PATH or of pyenv; None if it has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))):
        command = [candidate, "-c", "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):  # such as a shim of pyenv's for one that is not chosen
            continue
        if found[1] == version:
            return found[0]
    return None


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    """Each Python that radixlm is for; tests of those that this machine lacks are skipped."""
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"Python {request.param} is not on this machine")
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release: RADIXLM_DIST, or made now."""
    if "RADIXLM_DIST" in os.environ:
        return Path(os.environ["RADIXLM_DIST"]).resolve()
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run([sys.executable, ".ci/release.py", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


Install = Callable[[str, Sequence[object]], Clean]


@pytest.fixture(scope="session")
def install(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """`install(python, requirements)`: a new environment, with versions of the lock; of equal ones, that one."""

    @functools.cache
    def installed(python: str, requirements: tuple[object, ...]) -> Clean:
        folder = tmp_path_factory.mktemp("clean") / "venv"
        uv("venv", "--python", python, folder)
        found = ("--only-binary", ":all:", "--find-links", built, "--constraint", ROOT / "requirements.lock")
        uv("pip", "install", "--python", folder, *found, *requirements)
        return Clean(folder)

    return lambda python, requirements: installed(python, tuple(requirements))


@pytest.fixture(scope="session")
def tiny_source(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three small layers, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("sources") / "tiny"
    install(sys.executable, ["radixlm"]).run("python", "-c", TINY_MODEL, ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(install: Install, tiny_source: Path) -> Path:
    """The same, compiled."""
    path = tiny_source.parent / "tiny.radixlm"
    install(sys.executable, ["radixlm"]).run("radixlm", "compile", tiny_source, "-o", path)
    return path


def metadata(wheel: Path) -> Any:
    """A wheel's metadata, as an e-mail's headers and body."""
    import email
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))
