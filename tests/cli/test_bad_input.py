"""What a user can get wrong, by the real command: exit code 2, one line, no traceback, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from .forked_command import run_forked

COMMAND = [sys.executable, "-c", "from radixlm.cli.main import main; main()"]
HELD = (
    "import time; from radixlm.compile import compiler as c; check = c.check_logits; "
    "c.check_logits = lambda *given: time.sleep(30) or check(*given)"
)
PROGRESS = re.compile(r"(read|build|weights|verify|publish): |loading |[-0-9]+ [:,0-9]+ INFO uvicorn")


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    """A model to break."""
    return Path(shutil.copytree(tiny_source, tmp_path / "model"))


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """An artifact to break."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where to compile to; nothing else is in its folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.radixlm"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A GGUF file of an architecture that is not supported."""
    from gguf import GGUFWriter

    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_source_that_is_not_there(output: Path, tmp_path: Path) -> None:
    assert "does not exist" in _refuses_to_compile(tmp_path / "no.gguf", output)


@pytest.mark.parametrize("command", [["compile", "no.gguf", "-o", "out.radixlm"], ["generate", "no.radixlm", "hello"]])
def test_a_command_that_a_shell_starts_says_what_one_that_is_forked_says(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = subprocess.run([*COMMAND, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    forked = run_forked(command)
    assert started.returncode == forked.returncode == 2
    assert (started.stdout, _error(started)) == (forked.stdout, _error(forked))


def test_a_directory_that_is_no_model(output: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is no model" in _refuses_to_compile(tmp_path / "empty", output)


def test_a_file_that_is_no_model(output: Path, tmp_path: Path) -> None:
    for data in (b"", b"GGUF", b"PK\3\4" + b"x" * 1000, b"{}"):
        (tmp_path / "file").write_bytes(data)
        assert "no valid GGUF file" in _refuses_to_compile(tmp_path / "file", output)


def test_an_unsupported_architecture_says_where_those_supported_are(source: Path, gguf: Path, output: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    changed = config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (source / "config.json").write_text(json.dumps(changed))
    for path in (source, gguf):
        line = _refuses_to_compile(path, output)
        assert "mamba" in line.lower()
        assert "radixlm models lists" in line


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_truncated_safetensors(source: Path, output: Path, keep: float) -> None:
    weights = source / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * keep))
    assert "model.safetensors" in _refuses_to_compile(source, output)


def test_corrupted_safetensors(source: Path, output: Path) -> None:
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[20:40] = bytes(20)
    weights.write_bytes(data)
    assert "model.safetensors is no whole safetensors" in _refuses_to_compile(source, output)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_source_with_a_broken_json_file(source: Path, output: Path, name: str) -> None:
    (source / name).write_text('{"model": ')
    assert name in _refuses_to_compile(source, output)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_gguf(gguf: Path, output: Path, keep: float) -> None:
    os.truncate(gguf, int(gguf.stat().st_size * keep))
    assert "fetch it again" in _refuses_to_compile(gguf, output)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--quantize", "q3"),
        ("--target", "pentium"),
        ("--kv-dtype", "f8"),
        ("--context-length", "0"),
        ("--context-length", "many"),
        ("--context-length", "1000000"),
        ("--colour", "red"),
    ],
)
def test_an_option_that_compile_does_not_have(source: Path, output: Path, option: str, value: str) -> None:
    done = _run("compile", source, "-o", output, option, value)
    assert done.returncode == 2
    assert "Error: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(output.parent.iterdir())


def test_an_output_that_exists_and_is_no_artifact_stays_as_it_is(source: Path, output: Path) -> None:
    output.write_text("my thesis")
    assert "is no artifact" in _error(_run("compile", source, "-o", output))
    assert output.read_text() == "my thesis"
    output.unlink()
    output.mkdir()
    (output / "thesis.txt").touch()
    assert "is no artifact" in _error(_run("compile", source, "-o", output))
    assert list(output.iterdir()) == [output / "thesis.txt"]


def test_an_output_in_no_directory(source: Path, output: Path) -> None:
    assert "is no directory" in _error(_run("compile", source, "-o", output.parent / "no" / "model.radixlm"))


def test_no_c_compiler_is_needed(source: Path, output: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "CC": "no-such-cc", "CXX": "no-such-cxx"}
    done = _run("compile", source, "-o", output, env=environment)
    assert done.returncode == 0, done.stderr
    assert (output / "model.so").exists()


def test_a_file_that_cannot_grow_as_on_a_full_disk(source: Path, output: Path) -> None:
    line = _error(_run("compile", source, "-o", output, "--quantize", "f32", max_file_bytes=1 << 20))
    assert "File too large" in line
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stage", ["read", "build", "weights", "verify"])
def test_a_signal_in_mid_compile_leaves_nothing(
    source: Path, output: Path, stage: str, number: signal.Signals, code: int
) -> None:
    process = _start_held(stage, "compile", source, "-o", output)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"{stage}: "):
            break
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(60) == code
    assert "Traceback" not in rest
    assert not list(output.parent.iterdir())


def test_a_killed_compile_is_swept_up_by_the_next_and_hurts_nobody(source: Path, output: Path) -> None:
    stale, fresh = (output.parent / f".{output.name}.{name}.tmp" for name in ("stale___", "fresh___"))
    other = output.parent / ".other.radixlm.stale___.tmp"
    for directory in (stale, fresh, other):
        directory.mkdir()
        (directory / "model.so").touch()
    long_ago = time.time() - 7 * 24 * 3600
    for directory in (stale, other):
        os.utime(directory, (long_ago, long_ago))
    assert _run("compile", source, "-o", output).returncode == 0
    assert set(output.parent.iterdir()) == {output, fresh, other}


@pytest.mark.parametrize("command", ["inspect", "generate", "chat", "serve"])
def test_an_artifact_that_is_not_there(tmp_path: Path, command: str) -> None:
    arguments = ["hello"] if command == "generate" else []
    assert "no.radixlm does not exist" in _error(_run(command, tmp_path / "no.radixlm", *arguments))


@pytest.mark.parametrize("name", ["manifest.json", "model.so", "weights.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_artifact(artifact: Path, name: str, damage: str) -> None:
    path = artifact / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    line = _error(_run("generate", artifact, "hello"))
    assert name in line
    assert "compile it again" in line


def test_an_empty_prompt(artifact: Path) -> None:
    assert "prompt" in _error(_run("generate", artifact, ""))


def test_a_prompt_longer_than_the_context(artifact: Path) -> None:
    line = _error(_run("generate", artifact, "x " * 600))
    assert "512" in line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--top-k", "-5"),
        ("--max-tokens", "-1"),
        ("--repetition-penalty", "0"),
        ("--kv-cache-gb", "0.000001"),
        ("--max-num-seqs", "100000"),
    ],
)
def test_a_parameter_out_of_range_is_named(artifact: Path, option: str, value: str) -> None:
    line = _error(_run("generate", artifact, "hello", option, value))
    assert option.strip("-").replace("-", "_") in line.replace("-", "_")


def test_a_store_without_a_name_or_without_a_place_is_refused(artifact: Path) -> None:
    """An empty name, as of a variable that is not set, was the working directory."""
    assert "--store is empty" in _error(_run("generate", artifact, "hello", "--store", ""))
    assert "--store is not" in _error(_run("generate", artifact, "hello", "--store-gb", "1"))
    assert "--store is not" in _error(_run("generate", artifact, "hello", "--kv-budget", "0.5"))
    assert "--kv-budget is not" in _error(_run("generate", artifact, "hello", "--chunk-cache-mb", "5"))


def test_a_store_larger_than_the_disk_takes_no_memory_for_it(artifact: Path, tmp_path: Path) -> None:
    """1e12 GB ended in a MemoryError: as many pages were to be numbered."""
    done = _run("generate", artifact, "hello", "--store", tmp_path / "store", "--store-gb", "1e12", "--max-tokens", "1")
    assert done.returncode == 0, done.stderr


def _refuses_to_compile(source: Path, output: Path) -> str:
    line = _error(_run("compile", source, "-o", output))
    assert not list(output.parent.iterdir())
    return line


def _error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error, after lines that tell progress: of a compile, or of a server's start and end."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


def _run(
    *arguments: object, env: dict[str, str] | None = None, max_file_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    return run_forked([*map(str, arguments)], env=env, max_file_bytes=max_file_bytes)


def _start_held(stage: str, *arguments: object) -> subprocess.Popen[str]:
    """Start the command; its last stage waits, or a tiny model would be done before a signal comes."""
    held = f"{HELD}; {COMMAND[-1]}" if stage == "verify" else COMMAND[-1]
    return subprocess.Popen([sys.executable, "-c", held, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
