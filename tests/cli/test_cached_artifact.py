"""A model that is no artifact is compiled once into the cache folder, by the real command in an empty home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from radixlm.cli import cached_artifact
from radixlm.cli.main import cli
from radixlm.runtime.artifact.compiled_models import artifact_named
from radixlm.runtime.errors import ArtifactNotFound
from radixlm.runtime.server.http.listener import listen

COMMAND = [sys.executable, "-c", "from radixlm.cli.main import main; main()"]
ARGUMENTS = ("hello", "--max-tokens", "2", "--temperature", "0")


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    """A model to change and break."""
    return Path(shutil.copytree(tiny_source, tmp_path / "my model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where artifacts go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radixlm" / "artifacts"


def test_a_model_is_compiled_once_and_again_when_it_changed(source: Path, cache: Path) -> None:
    first = _run("generate", source, *ARGUMENTS)
    assert first.returncode == 0, first.stderr
    artifact = _kept(cache)
    second = _run("generate", source, *ARGUMENTS)
    assert artifact.name.startswith("my_model-")
    assert first.stderr.splitlines()[0] == f"compiling {source}, once; it will be cached in {artifact}"
    assert "verify" in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert json.loads((artifact / "manifest.json").read_text())["name"] == "my_model"

    os.utime(source / "model.safetensors")
    changed = _run("generate", source, *ARGUMENTS, "--kv-dtype", "f32")
    assert changed.returncode == 0
    _kept(cache, count=2)


def test_two_processes_compile_once(source: Path, cache: Path) -> None:
    processes = [_start("generate", source, *ARGUMENTS) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    said = [error for _, error in outputs]
    assert sorted("compiling " in error for error in said) == [False, True]
    _kept(cache)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(source: Path, cache: Path, number: signal.Signals, code: int) -> None:
    process = _start("generate", source, *ARGUMENTS)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("build:"):
            break
    process.send_signal(number)
    rest = process.stderr.read()  # until the compiler, which has the same stream, has ended, too
    assert process.wait(60) == code
    assert "Traceback" not in rest
    assert list(cache.iterdir()) == []


def test_a_port_in_use_is_said_before_anything_is_compiled(source: Path, cache: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        line = _error(_run("serve", source, "--port", port))
    assert f"port {port} of 127.0.0.1 is in use by another process" in line and "choose another --port" in line
    assert not cache.exists()


def test_a_server_answers_503_while_it_compiles_and_then_serves(source: Path, cache: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    process = _start("serve", source, "--port", port)
    assert process.stderr is not None
    statuses, percents = [], []
    for line in process.stderr:
        if line.startswith("build:"):
            health = httpx.get(f"http://127.0.0.1:{port}/health")
            statuses.append(health.status_code)
            percents += [percent for percent in [health.json().get("percent")] if percent is not None]
            assert httpx.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
            with pytest.raises(OSError, match="in use"):
                listen("127.0.0.1", port).close()
        if line.startswith("serving "):
            break
    statuses.append(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.stderr.close()
    # a line is read after it was written: the last ones may meet a server that is ready
    assert statuses[0] == 503 and statuses == sorted(statuses, reverse=True) and statuses[-1] == 200
    assert percents == sorted(percents) and max(percents, default=0) > 0
    _kept(cache)


def test_a_command_that_ends_before_its_writer_has_begun_keeps_the_artifact(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = """
        from radixlm.compile import in_memory
        in_memory.be_idle = lambda: __import__("time").sleep(2)"""
    _change_compiler(monkeypatch, tmp_path, slow)
    assert _run("generate", source, *ARGUMENTS).returncode == 0
    assert cached_artifact._is_whole(_kept(cache))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_wrong_logits_end_a_server_before_it_serves(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Its engine is open by then, and has computed a step."""
    wrong = """
        import time
        from radixlm.compile import compiler
        from radixlm.runtime.errors import VerificationFailed
        def check(*_):
            time.sleep(2)
            raise VerificationFailed("logits differ")
        compiler.check_logits = check"""
    _change_compiler(monkeypatch, tmp_path, wrong)
    process = _start("serve", source, "--port", "0", "--log-format", form)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 2, said
    assert "logits differ" in said and "Traceback" not in said and "serving " not in said
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_wrong_weights_stop_a_server_that_has_begun_to_serve(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Half of all bytes become wrong once logits were compared. All bytes are compared when the server is ready. The
    log in JSON had a line that was none.
    """
    is_serving = tmp_path / "is serving"
    wrong = f"""
        import pathlib, time
        from radixlm.compile import compiler, in_memory
        real = compiler.check_logits
        def check(artifact, *args):
            found = real(artifact, *args)
            with artifact.weights_path.open("r+b") as file:
                file.seek(artifact.data_offset())
                times = __import__("os").fstat(file.fileno())
                file.write(bytes([37]) * (artifact.manifest.module.weights_bytes // 2))
                file.flush()  # at its time: a server that opens it only now would read it all, and see it
                __import__("os").utime(file.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))
            return found
        compiler.check_logits = check
        def wait():
            while not pathlib.Path({str(is_serving)!r}).exists():
                time.sleep(0.01)
        in_memory.be_idle = wait"""
    _change_compiler(monkeypatch, tmp_path, wrong)
    process = _start("serve", source, "--port", "0", "--log-format", form)
    assert process.stderr is not None
    said = ""
    while "serving " not in said and (line := process.stderr.readline()):
        said += line
    is_serving.touch()
    said += process.communicate(timeout=100)[1]
    assert process.returncode == 143, said
    if form == "json":
        said = "\n".join(json.loads(line)["message"] for line in said.splitlines())
    assert "serving " in said
    assert "Error: model." in said and "differs from the source in the numbers of rows" in said
    assert list(cache.iterdir()) == []


def test_a_server_says_when_its_model_is_kept(source: Path, cache: Path) -> None:
    process = _start("serve", source, "--port", "0")
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.startswith(("kept in ", "not kept")))
    assert said == f"kept in {_kept(cache)}; the next start takes it from there\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.stderr.close()


def test_the_artifact_of_a_killed_server_is_kept(source: Path, cache: Path) -> None:
    process = _start("serve", source, "--port", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving "):
            break
    process.kill()
    process.wait(60)
    process.stderr.close()
    artifact = _kept(cache)
    again = _run("generate", source, *ARGUMENTS)
    assert (again.returncode, again.stderr) == (0, "")
    assert cached_artifact._is_whole(artifact)


def test_a_signal_ends_a_server_that_compiles(source: Path, cache: Path) -> None:
    process = _start("serve", source, "--port", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("build:"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "Traceback" not in rest
    assert list(cache.iterdir()) == []


def test_a_damaged_model_is_one_line_before_anything_is_compiled(source: Path, cache: Path) -> None:
    os.truncate(source / "model.safetensors", 5000)
    line = _error(_run("serve", source, "--port", "0"))
    assert "model.safetensors is truncated" in line and "fetch it again" in line
    assert not cache.exists()


def test_a_model_that_cannot_be_compiled_is_one_line_and_nothing_is_announced(source: Path, cache: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    unknown = {"architectures": ["XyzzyForCausalLM"], "model_type": "xyzzy"}
    (source / "config.json").write_text(json.dumps(config | unknown))
    assert "XyzzyForCausalLM" in _error(_run("generate", source, *ARGUMENTS))
    done = _run("serve", source, "--port", "0", "--log-format", "json")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and json.loads(line)["level"] == "error" and "XyzzyForCausalLM" in line
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0"], ["chat"], ["generate"], ["run"], ["pull"], ["inspect"], ["compile", "-o", "x.radixlm"]],
)
def test_a_folder_of_models_is_answered_with_their_names(command: list[str], cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_text("GGUF")
    prompt = ["hello"] if command == ["generate"] else []
    done = CliRunner().invoke(cli, [*command, str(folder), *prompt])
    assert done.exit_code == 2 and "compiling" not in done.output
    assert (
        f"such as {folder}/a.gguf" in done.output
        and f"radixlm serve --models {folder} (it has a.gguf, b.gguf)" in done.output
    )


def test_a_cache_folder_that_cannot_be_is_said_with_what_to_do(source: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    line = _error(_run("generate", source, *ARGUMENTS))
    assert "cannot be written" in line and "XDG_CACHE_HOME" in line and "-o my_model.radixlm" in line


def test_a_damaged_artifact_is_none(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm"))
    assert cached_artifact._is_whole(copy)
    os.truncate(copy / "weights.safetensors", 5000)
    assert not cached_artifact._is_whole(copy)
    assert not cached_artifact._is_whole(tmp_path / "nowhere.radixlm")


def test_options_of_the_compiler_are_refused_for_an_artifact(tiny_artifact: Path) -> None:
    line = _error(_run("generate", tiny_artifact, *ARGUMENTS, "--quantize", "q8"))
    assert "is already compiled" in line and "--quantize q8" in line


def test_a_start_from_the_cache_loads_no_compiler(source: Path, cache: Path, tiny_artifact: Path) -> None:
    path = cache / f"my_model-{cached_artifact._key(str(source), {})}.radixlm"
    shutil.copytree(tiny_artifact, path)
    code = (
        "import sys\nfrom radixlm.cli.main import cli\n"
        f"try: cli({['generate', str(source), *ARGUMENTS]!r})\nexcept SystemExit: pass\n"
        "print([name for name in ('tvm', 'radixlm.compile') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("[]", "")


def test_a_key_is_of_files_options_and_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(options: Mapping[str, str] | None = None) -> str:
        return cached_artifact._key(str(source), options or {})

    first = key()
    assert key() == first
    (source / "README.txt").write_text("no part of the model")
    assert key() == first
    keys = {first, key({"quantize": "q4"}), key({"kv-dtype": "q4"})}
    weights = source / "model.safetensors"
    os.utime(weights, ns=(0, time.time_ns()))
    keys.add(key())
    weights.write_bytes(weights.read_bytes() + b" ")
    keys.add(key())
    monkeypatch.setattr(cached_artifact, "_digest_of_compiler", lambda: "another")
    keys.add(key())
    assert len(keys) == 6
    assert cached_artifact._key("hf:org/name", {}) != cached_artifact._key("hf:org/name@v1", {})


def test_what_is_an_artifact_is_known_by_its_name_or_its_manifest(source: Path, tiny_artifact: Path) -> None:
    assert [artifact_named(name) for name in ("nowhere.radixlm", str(tiny_artifact))] == [
        Path("nowhere.radixlm"),
        tiny_artifact,
    ]
    assert [artifact_named(name) for name in ("smollm2", "hf:org/name", str(source))] == [None] * 3
    with pytest.raises(ArtifactNotFound, match=r"nowhere\.gguf does not exist; give an artifact, "):
        artifact_named("nowhere.gguf")
    with pytest.raises(ArtifactNotFound, match=r"did you mean hf:Qwen/Qwen3-4B-GGUF\?"):
        artifact_named("Qwen/Qwen3-4B-GGUF")


def _error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def _change_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Have processes that compile into memory begin with `code`."""
    (folder / "site").mkdir()
    text = f"import sys\nif '--in-memory' in sys.orig_argv:{code}\n"
    (folder / "site" / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def _start(*arguments: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], text=True, **pipes)  # type: ignore[call-overload]


def _kept(cache: Path, count: int = 1) -> Path:
    """The newest of `count` artifacts, once nothing is written beside them. A killed server leaves its directory."""
    for _ in range(2400):  # the process that writes it has what CPU time others leave
        names = [path.name for path in cache.iterdir()]
        if len([name for name in names if name.endswith(".radixlm")]) == count and not any(
            name.endswith(".lock") for name in names
        ):
            return max(cache.glob("[!.]*.radixlm"), key=lambda path: path.stat().st_mtime)
        time.sleep(0.1)
    raise AssertionError(f"{cache} holds {names}")
