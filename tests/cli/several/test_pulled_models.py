"""The file of models that clients pulled: names of the hub alone, kept in order, forgotten when they are deleted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from radixlm.cli.cached_artifact import artifact_path
from radixlm.cli.serve import command
from radixlm.cli.several.model_list import ModelEntry
from radixlm.cli.several.pulled_models import PulledModels
from radixlm.cli.several.serve_models import artifacts_of
from radixlm.runtime.artifact.artifact_use import ArtifactUse
from radixlm.runtime.artifact.compiled_models import artifacts_dir
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.server.errors import HTTPError


def library(file: Path, *shared: str) -> PulledModels:
    """Return a list whose models are served with the flags `shared`."""

    def spec(entry: ModelEntry) -> ModelSpec:
        return ModelSpec(entry.client_name, entry.source)

    return PulledModels(file, spec, partial(artifacts_of, command, shared))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    artifacts_dir().mkdir(parents=True)
    return artifacts_dir()


def compiled(source: str, **options: str) -> Path:
    """Return the artifact of a source, which has been compiled with these options."""
    path = artifact_path(source, options)
    path.mkdir()
    return path


def test_a_name_is_of_the_hub_or_the_alias_and_never_a_path(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    pulled = library(tmp_path / "pulled.txt")
    for name, source in (
        ("hf:org/name", "hf:org/name"),
        ("hf.co/org/name-GGUF:Q4_K_M", "hf:org/name-GGUF:Q4_K_M"),
        ("https://huggingface.co/org/name", "hf:org/name"),
        ("smollm2", "smollm2"),
    ):
        assert pulled.spec_of(name) == ModelSpec(name, source)
    paths = (str(tmp_path / "x.gguf"), "x.gguf", "hf:a/../b", "hf:a/b.radixlm", "hf:a/b@c.radixlm")
    for name in ("", "llama3.2", "hf:", "hf:name", "hf:a/b c", "hf:a/b/c", *paths):
        with pytest.raises(HTTPError, match="hub") as refused:
            pulled.spec_of(name)
        assert refused.value.status == 404


def test_names_are_kept_in_order_and_deleted_ones_are_not(tmp_path: Path) -> None:
    file = tmp_path / "pulled.txt"
    pulled = library(file)
    assert pulled.entries == [] and not file.exists()
    specs = [pulled.spec_of(name) for name in ("smollm2", "hf.co/org/a", "hf:org/b")]
    for spec in specs:
        pulled.add(spec)
    again = library(file)
    assert [entry.source for entry in again.entries] == ["smollm2", "hf:org/a", "hf:org/b"]
    again.forget(specs[1])
    assert file.read_text() == "smollm2\nhf:org/b\n" and [each.name for each in tmp_path.iterdir()] == ["pulled.txt"]
    assert again.has("smollm2") and not again.has("hf.co/org/a")


def test_only_the_artifact_that_the_deleted_model_was_compiled_into_is_removed(cache: Path, tmp_path: Path) -> None:
    own = compiled("hf:org/name", quantize="q4")
    other = compiled("hf:org/name", quantize="q8"), compiled("hf:another/name", quantize="q4")
    pulled = library(tmp_path / "pulled.txt", "--quantize", "q4")
    gone = (ModelSpec("x", "x.radixlm"), ModelSpec("y", "y.gguf"), ModelSpec("z", "hf:another/name"))
    for _ in range(2):  # nothing is left for the second time
        pulled.remove_artifact(ModelSpec("hf:org/name", "hf:org/name"), gone)
        assert not own.exists() and {*cache.iterdir()} == {*other}


def test_an_artifact_stays_that_another_model_is_served_from_or_a_process_has_open(cache: Path, tmp_path: Path) -> None:
    own = compiled("hf:org/name")
    (tmp_path / "link.radixlm").symlink_to(own)
    pulled, spec = library(tmp_path / "pulled.txt"), ModelSpec("hf:org/name", "hf:org/name")
    sources = ("hf:org/name", "name", own.name.removesuffix(".radixlm"), str(own), str(tmp_path / "link.radixlm"))
    drafted = ModelSpec("large", "hf:org/large", flags=("--draft", "hf:org/name"))
    for other in (*(ModelSpec("other", source) for source in sources), drafted):
        pulled.remove_artifact(spec, [other])
        assert own.exists(), other
    use = ArtifactUse.begin(own)
    pulled.remove_artifact(spec, [])
    assert own.exists()
    use.end()
    pulled.remove_artifact(spec, [])
    assert not own.exists()


def test_no_name_is_lost_or_kept_twice_whatever_ends_at_once(tmp_path: Path) -> None:
    pulled = library(tmp_path / "pulled.txt")
    specs = [ModelSpec(f"hf:org/{number}", source="") for number in range(64)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(pulled.add, [*specs, *specs]))
        assert sorted(pulled.names) == sorted(spec.name for spec in specs)
        list(threads.map(pulled.forget, specs[1:]))
    assert pulled.names == ["hf:org/0"]


def test_a_file_that_cannot_be_read_is_said_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "pulled.txt").write_bytes(b"\xff")
    with pytest.raises(InvalidParameter, match=r"--allow-pull .*pulled\.txt cannot be read"):
        _ = library(tmp_path / "pulled.txt").names


def test_a_list_that_cannot_be_written_is_an_error_before_anything_is_pulled(tmp_path: Path) -> None:
    pulled = library(tmp_path / "pulled.txt")
    pulled.check()
    assert [path.name for path in tmp_path.iterdir()] == ["pulled.txt"] and pulled.names == []
    nowhere = library(tmp_path / "nowhere" / "pulled.txt")
    with pytest.raises(InvalidParameter, match=f"--allow-pull {nowhere.path}"):
        nowhere.check()
    with pytest.raises(HTTPError, match="cannot be written") as refused:
        nowhere.add(ModelSpec("hf:a/b", source="hf:a/b"))
    assert refused.value.status == 507 and str(tmp_path) not in str(refused.value)


def test_a_name_that_is_too_long_for_a_file_is_no_model(tmp_path: Path) -> None:
    def spec(entry: ModelEntry) -> ModelSpec:
        Path(entry.source).stat()
        return ModelSpec(entry.client_name, entry.source)

    pulled = PulledModels(tmp_path / "pulled.txt", spec, lambda each: ())
    with pytest.raises(HTTPError) as refused:
        pulled.spec_of(f"hf:{'a' * 300}/b")
    assert refused.value.status == 404
