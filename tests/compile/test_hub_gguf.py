"""GGUF files of a hub: which one a name means, and that what arrives is what the hub has, however it was sent."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.compile.sources import hub, open_source
from radixlm.compile.sources.hub.gguf_choice import choose_gguf, quantization_of
from radixlm.runtime.artifact.model_names import HubName
from radixlm.runtime.errors import CorruptSource, SourceNotFound

from ..stand_in_hub import TOKEN, StandInHub

Make = Callable[..., Any]
CONTENT = b"GGUF" + bytes(range(256)) * 40
FILES = ("tiny.Q4_K_M.gguf", "tiny-q8_0-00001-of-00002.gguf", "tiny-q8_0-00002-of-00002.gguf", "mmproj-tiny-f16.gguf")


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub with one repository of GGUF files."""
    server = StandInHub(tmp_path / "hub")
    server.folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (server.folder / name).write_bytes(CONTENT + bytes([number]))
    (server.folder / "README.md").write_text("# Tiny")
    (server.folder / "config.json").write_text("{}")  # as some have, without its weights
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no token"))
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def fetch(local_hub: StandInHub, name: str = "hf:org/tiny:Q4_K_M") -> Path:
    return hub.download(name, cache_dir=local_hub.root.parent / "cache", progress=lambda done, total: None)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hf:org/tiny", "tiny.Q4_K_M.gguf"),
        ("hf:org/tiny:q4_k_m@main", "tiny.Q4_K_M.gguf"),
        ("hf:org/tiny/tiny.Q4_K_M.gguf", "tiny.Q4_K_M.gguf"),
        ("hf:org/tiny:Q8_0", "tiny-q8_0-00001-of-00002.gguf"),
        ("hf:org/tiny/tiny-q8_0-00002-of-00002.gguf", "tiny-q8_0-00001-of-00002.gguf"),
    ],
)
def test_a_name_fetches_its_files_and_no_others(name: str, file: str, local_hub: StandInHub) -> None:
    path = fetch(local_hub, name)
    wanted = sorted(each for each in FILES if each.partition("-0000")[0] == file.partition("-0000")[0])
    assert path.name == file
    assert sorted(each.name for each in path.parent.iterdir()) == wanted
    assert all((path.parent / each).read_bytes() == (local_hub.folder / each).read_bytes() for each in wanted)
    assert len(local_hub.bytes_sent()) == len(wanted)
    assert local_hub.leaked == []


def test_a_fetched_model_opens_under_its_name(local_hub: StandInHub, make_tiny: Make, write_gguf: Make) -> None:
    (local_hub.folder / FILES[0]).write_bytes(write_gguf(make_tiny()).read_bytes())
    with open_source("hf:org/tiny:Q4_K_M", cache_dir=local_hub.root.parent / "cache") as source:
        assert (source.name, source.info.format) == ("tiny-Q4_K_M", "gguf")


@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(breaks=st.lists(st.integers(0, len(CONTENT)), max_size=3), ignores_ranges=st.booleans(), flips=st.integers(0, 1))
def test_what_breaks_off_goes_on_and_is_right(
    breaks: list[int], ignores_ranges: bool, flips: int, local_hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left of earlier tries, and whether or not the server sends ranges."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    local_hub.ignores_ranges, local_hub.flips, local_hub.breaks_after = ignores_ranges, flips, None
    with tempfile.TemporaryDirectory() as folder:
        blobs = Path(folder, "hub", "models--org--tiny", "blobs")
        blobs.mkdir(parents=True)
        expected = (local_hub.folder / FILES[0]).read_bytes()
        partial = blobs / (hashlib.sha256(expected).hexdigest() + ".partial")
        for length in breaks:
            partial.write_bytes(expected[:length])
        local_hub.requests.clear()
        path = hub.download("hf:org/tiny", cache_dir=Path(folder), progress=lambda done, total: None)
        assert path.read_bytes() == expected
        assert not partial.exists()
        if breaks and 0 < breaks[-1] < len(expected):
            assert local_hub.bytes_sent()[0].endswith(f" bytes={breaks[-1]}-")


def test_a_broken_connection_keeps_what_came_for_the_next_try(
    local_hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    local_hub.breaks_after = 0  # whatever is tried again brings nothing
    with pytest.raises(SourceNotFound, match="cannot be had") as caught:
        fetch(local_hub)
    assert "\n" not in str(caught.value)
    local_hub.breaks_after = 1000
    assert fetch(local_hub).read_bytes() == (local_hub.folder / FILES[0]).read_bytes()
    ranges = [request.rpartition("=")[2] for request in local_hub.bytes_sent() if "bytes=" in request]
    assert ranges[:3] == ["1000-", "2000-", "3000-"]


def test_a_wrong_bit_is_found_and_twice_an_error(local_hub: StandInHub) -> None:
    local_hub.flips = 1
    assert fetch(local_hub).read_bytes() == (local_hub.folder / FILES[0]).read_bytes()
    local_hub.flips = 2
    with pytest.raises(CorruptSource, match=r"tiny-q8_0-00001.*has sha256 [0-9a-f]{16}.*, the hub says"):
        fetch(local_hub, "hf:org/tiny:Q8_0")


def test_a_file_that_was_damaged_here_is_fetched_again(local_hub: StandInHub) -> None:
    path = fetch(local_hub)
    blob = path.resolve()
    blob.write_bytes(CONTENT[::-1])
    assert fetch(local_hub).read_bytes() == (local_hub.folder / FILES[0]).read_bytes()


def test_progress_tells_all_bytes_and_never_goes_back(local_hub: StandInHub) -> None:
    seen: list[tuple[int, int]] = []
    cache = local_hub.root.parent / "cache"
    hub.download("hf:org/tiny:Q8_0", cache_dir=cache, progress=lambda done, total: seen.append((done, total)))
    total = 2 * (len(CONTENT) + 1)
    assert seen[-1] == (total, total) and {total for _, total in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:org/tiny:Q5_K_M", r"has no file in Q5_K_M; it has .*Q4_K_M"),
        ("hf:org/tiny/other.gguf", r"is no file of org/tiny; it has"),
        ("hf:org/missing:Q4_K_M", "check the name; if it is private or gated, set HF_TOKEN"),
        ("hf:org/tiny/README.md", "check the name"),
    ],
)
def test_what_the_hub_lacks_is_one_line(name: str, said: str, local_hub: StandInHub) -> None:
    with pytest.raises(SourceNotFound, match=said) as caught:
        fetch(local_hub, name)
    assert "\n" not in str(caught.value)


def test_a_gated_model_needs_a_token(local_hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    local_hub.gated = {"org/tiny"}
    with pytest.raises(SourceNotFound, match=r"it is gated: accept its terms at .*/org/tiny, and set HF_TOKEN"):
        fetch(local_hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(local_hub).is_file()
    assert local_hub.leaked == []


def test_what_was_fetched_is_used_without_the_hub(local_hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(local_hub)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(local_hub) == path
    with pytest.raises(SourceNotFound, match=r"cannot be asked|has no file in Q8_0"):
        fetch(local_hub, "hf:org/tiny:Q8_0")


def test_offline_no_server_is_asked(local_hub: StandInHub) -> None:
    path = fetch(local_hub)
    local_hub.requests.clear()
    code = (
        "import sys; from pathlib import Path; from radixlm.compile.sources import hub;"
        "print(hub.download('hf:org/tiny:Q4_K_M', cache_dir=Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(local_hub.root.parent / "cache")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == str(path)
    assert local_hub.requests == []


LABELS = ("Q4_K_M", "Q8_0", "IQ2_XXS", "UD-Q4_K_XL", "BF16", "MXFP4")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(LABELS), unique=True, min_size=1), st.sampled_from(LABELS), st.integers(1, 3))
def test_a_quantization_is_chosen_exactly_or_refused(labels: list[str], wanted: str, count: int) -> None:
    def files(label: str) -> list[str]:
        stem = f"{label}/Model-7B-{label}"
        return [f"{stem}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)] if count > 1 else [f"{stem}.gguf"]

    names = [name for label in labels for name in files(label)]
    assert {quantization_of(name) for name in names} == set(labels)
    if wanted in labels:
        assert choose_gguf(names, wanted.lower(), "hf:org/model") == files(wanted)
    else:
        with pytest.raises(SourceNotFound, match="it has"):
            choose_gguf(names, wanted, "hf:org/model")


def test_two_files_of_one_quantization_are_named() -> None:
    with pytest.raises(SourceNotFound, match=r"name one: hf:o/n/a-Q8_0\.gguf@v1 or hf:o/n/b-Q8_0\.gguf@v1"):
        choose_gguf(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "hf:o/n:Q8_0@v1")


@pytest.mark.parametrize("name", ["hf:org/name/readme.txt", "hf:org/name:", "hf:org/name/a.gguf:Q8_0"])
def test_a_name_of_no_form_is_refused(name: str) -> None:
    with pytest.raises(SourceNotFound, match="names no model of the hub"):
        HubName.parse(name)
