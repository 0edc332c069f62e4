"""What pull, list and rm say and do, in an empty home."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.cli.main import cli
from radixlm.cli.models.kept import Kept, beyond
from radixlm.compile.sources.default_model import FILE_NAME
from radixlm.compile.sources.hub import repository
from radixlm.runtime import Engine
from radixlm.runtime.artifact.compiled_models import artifact_named
from radixlm.runtime.artifact.find_artifact import find_artifact
from radixlm.runtime.errors import ArtifactNotFound, CompileError
from radixlm.runtime.store.files import StoreLock

from .forked_command import run_forked

if TYPE_CHECKING:
    from .conftest import FakeEngine

KEY = "0123456789abcdef"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, with the hub's beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(repository, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "radixlm"


def keep(home: Path, artifact: Path, name: str, last_used: float) -> Path:
    """Put an artifact where commands keep them."""
    path = home / "artifacts" / f"{name}.radixlm"
    shutil.copytree(artifact, path)
    os.utime(path, (last_used, last_used))
    return path


def run(runner: CliRunner, *arguments: str) -> Result:
    return runner.invoke(cli, [*arguments])


def test_nothing_is_listed_in_an_empty_home(home: Path, runner: CliRunner) -> None:
    assert run(runner, "list").output == "nothing yet; try: radixlm run smollm2\n"
    assert json.loads(run(runner, "list", "--json").output) == []


def test_everything_is_listed_with_size_and_last_use(home: Path, tiny_artifact: Path, runner: CliRunner) -> None:
    now = time.time()
    keep(home, tiny_artifact, f"old-{KEY}", now - 3 * 86400)
    keep(home, tiny_artifact, f"new-Q8_0-{KEY}", now - 2 * 3600)
    blob = home.parent / "hub" / "models--org--tiny" / "blobs" / "half.partial"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(2_000_000))
    (home / "stores" / "tiny").mkdir(parents=True)
    (home / "stores" / "tiny" / "1.pages").write_bytes(bytes(1_000_000))
    rows = {row["name"]: row for row in json.loads(run(runner, "list", "--json").output)}
    assert {name: row["kind"] for name, row in rows.items()} == {
        f"old-{KEY}": "compiled",
        f"new-Q8_0-{KEY}": "compiled",
        "hf:org/tiny": "download",
        "tiny": "store",
    }
    assert rows["hf:org/tiny"]["num_bytes"] == 2_000_000 and rows["tiny"]["num_bytes"] >= 1_000_000
    said = run(runner, "list").output
    assert "3 days ago" in said and "2 hours ago" in said and "in all" in said
    assert said.index("just now") < said.index("2 hours ago") < said.index("3 days ago")


def test_rm_removes_what_is_named_and_nothing_else(home: Path, tiny_artifact: Path, runner: CliRunner) -> None:
    kept = [keep(home, tiny_artifact, name, 1000) for name in (f"tiny-{KEY}", f"tiny-{KEY[::-1]}", f"tiny-Q8_0-{KEY}")]
    assert "would remove" in run(runner, "rm", "tiny", "--dry-run").output
    assert all(path.exists() for path in kept)
    assert run(runner, "rm", "tiny").exit_code == 0
    assert [path.exists() for path in kept] == [False, False, True]
    assert run(runner, "rm", "hf:org/tiny:Q8_0").exit_code == 0
    assert list((home / "artifacts").iterdir()) == []


def test_every_listed_name_of_a_compiled_model_can_be_run(
    home: Path, tiny_artifact: Path, runner: CliRunner, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (keep(home, tiny_artifact, f"tiny-Q8_0-{key}", at) for key, at in ((KEY, 1000), (KEY[::-1], 2000)))
    hidden = keep(home, tiny_artifact, f".removed-1-tiny-Q8_0-{KEY}", 3000)
    rows = json.loads(run(runner, "list", "--json").output)
    assert len(rows) == 2
    for row in rows:
        assert hidden.name.removesuffix(".radixlm") != row["name"]
        assert run(runner, "generate", row["name"], "Hi").exit_code == 0
        assert run(runner, "inspect", row["name"]).exit_code == 0
    assert artifact_named(f"tiny-Q8_0-{KEY}") == old == find_artifact(old.name.removesuffix(".radixlm"))
    assert artifact_named("tiny-Q8_0") == new
    monkeypatch.chdir(home.parent)
    (home.parent / "tiny-Q8_0").mkdir()  # a path is always that path
    assert artifact_named("tiny-Q8_0") is None
    for wrong, right in (("tiny-q8", "tiny-Q8_0"), ("smolm2", "smollm2"), (f"tiny-Q8_0-{KEY[:9]}", f"tiny-Q8_0-{KEY}")):
        assert f"{wrong} does not exist; did you mean {right}?" in run(runner, "chat", wrong).output


def test_rm_leaves_what_is_open(home: Path, tiny_artifact: Path, runner: CliRunner) -> None:
    old, new = (keep(home, tiny_artifact, f"{name}-{KEY}", at) for name, at in (("old", 1000), ("new", 2000)))
    with Engine(old, kv_cache_bytes=1 << 20) as engine:
        assert "open now" in run(runner, "list").output
        refused = run(runner, "rm", "old", "new")
        assert refused.exit_code == 2 and "in use by another process" in refused.output
        assert new.exists()
        assert run(runner, "rm", "--keep-gb", "0").exit_code == 0
        assert old.exists() and not new.exists()
        assert engine.generate("hello").usage.completion_tokens
    assert run(runner, "rm", "old").exit_code == 0
    assert not old.exists()


def test_rm_removes_downloads_and_stores_only_when_told(home: Path, runner: CliRunner) -> None:
    folders = [home.parent / "hub" / "models--org--tiny", home / "stores" / "tiny"]
    for folder in folders:
        folder.mkdir(parents=True)
    refused = run(runner, "rm", "hf:org/tiny")
    assert refused.exit_code == 2 and "add --kind download" in refused.output
    assert run(runner, "rm", "--kind", "download", "hf:org/tiny").exit_code == 0
    assert [folder.exists() for folder in folders] == [False, True]
    lock = StoreLock.take(folders[1])
    refused = run(runner, "rm", "--kind", "store", "tiny")
    assert refused.exit_code == 2 and "tiny is in use" in refused.output
    lock.release()
    assert run(runner, "rm", "--kind", "store", "tiny").exit_code == 0
    assert not folders[1].exists()


def test_rm_names_the_download_that_stays(home: Path, tiny_artifact: Path, runner: CliRunner) -> None:
    keep(home, tiny_artifact, f"smollm2-{KEY}", 0.0)
    download = home / FILE_NAME
    download.touch()
    removed = run(runner, "rm", "smollm2").output
    assert "the download stays; remove it with: radixlm rm --kind download smollm2" in removed
    assert download.exists()
    assert "stays" not in run(runner, "rm", "--kind", "download", "smollm2").output
    assert not download.exists()
    assert "there is no model named 'smollm2'; radixlm list" in run(runner, "rm", "smollm2").output
    assert "give NAME, or --keep-gb" in run(runner, "rm").output


@pytest.mark.parametrize("arguments", [(), ("tiny", "--keep-gb", "1"), ("nothing",)])
def test_rm_of_nothing_is_bad_input(arguments: tuple[str, ...], home: Path, runner: CliRunner) -> None:
    assert run(runner, "rm", *arguments).exit_code == 2


def test_an_empty_name_is_not_the_current_directory(
    home: Path, tiny_artifact: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory called like a model, `rm ""` removed that model."""
    kept = keep(home, tiny_artifact, f"work-{KEY}", 0.0)
    (home.parent / "work").mkdir()
    monkeypatch.chdir(home.parent / "work")
    assert "NAME is empty" in run(runner, "rm", "").output
    assert "it must be a number of GB" in run(runner, "rm", "--keep-gb", "nan").output
    assert kept.is_dir()
    for command in ("pull", "chat", "serve"):
        refused = run(runner, command, "")
        assert refused.exit_code == 2 and "the name of the model is empty" in refused.output


SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SIZES, st.integers(0, 200))
def test_the_oldest_go_until_the_rest_fits(found: list[tuple[int, int, bool]], limit: int) -> None:
    """Against taking the oldest one by one."""
    kept = [
        Kept("compiled", str(number), "model", Path(), size, float(used), is_open, lambda: None)
        for number, (size, used, is_open) in enumerate(found)
    ]
    left = list(kept)
    while sum(each.num_bytes for each in left) > limit:
        closed = [each for each in left if not each.is_open]
        if not closed:
            break
        left.remove(min(closed, key=lambda each: each.last_used))
    chosen = beyond(kept, limit)
    assert [each for each in kept if each not in chosen] == left


def test_pull_and_an_engine_compile_a_model_once(
    home: Path, tiny_source: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, find_artifact.__module__)  # as where no server has set up a log
    with Engine(tiny_source, kv_cache_bytes=1 << 20) as engine:
        assert engine.generate("hello").usage.prompt_tokens
    assert f"compiling {tiny_source}, once" in capfd.readouterr().err
    (artifact,) = (home / "artifacts").glob("*.radixlm")
    assert find_artifact(str(tiny_source)) == artifact
    assert capfd.readouterr().err == ""
    with Engine(artifact, draft=tiny_source, kv_cache_bytes=1 << 24) as engine:
        draft = engine.stats().draft
        assert draft is not None and draft.about is not None and draft.about.name == engine.manifest.name
    assert capfd.readouterr().err == ""


def test_an_engine_of_nothing_is_an_error_with_the_reason(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFound, match=r"did you mean hf:Qwen/Qwen3-4B\?"):
        Engine("Qwen/Qwen3-4B")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(CompileError, match=r"broken\.gguf is no valid GGUF file"):
        Engine(tmp_path / "broken.gguf")


def test_pull_prints_the_path_and_downloads_alone(home: Path, runner: CliRunner, tiny_artifact: Path) -> None:
    assert run(runner, "pull", str(tiny_artifact)).output == f"{tiny_artifact}\n"
    refused = run(runner, "pull", "--download-only", str(tiny_artifact))
    assert refused.exit_code == 2 and "is not downloaded by name" in refused.output


def test_a_model_without_a_chat_template_is_refused_before_it_is_compiled(
    home: Path, tiny_source: Path, tmp_path: Path
) -> None:
    source = tmp_path / "silent"
    shutil.copytree(tiny_source, source, ignore=shutil.ignore_patterns("chat_template*"))
    settings_file = source / "tokenizer_config.json"
    if settings_file.exists():
        own = json.loads(settings_file.read_text())
        settings_file.write_text(json.dumps({name: own[name] for name in own if name != "chat_template"}))
    refused = run_forked(["run", str(source), "Hi"])
    assert refused.returncode == 2, refused.stderr
    assert f"{source} has no chat template; continue a text instead: radixlm generate {source}" in refused.stderr
    assert "build" not in refused.stderr and not list((home / "artifacts").glob("*.radixlm"))
