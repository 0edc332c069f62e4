"""Which models `serve --models` is given, and with which options."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.cli.serve import command
from radixlm.cli.several.model_list import ModelEntry, read_models
from radixlm.cli.several.serve_models import usable_specs
from radixlm.cli.several.worker_flags import parsed_flags
from radixlm.runtime.errors import ArtifactNotFound, InvalidParameter, SourceNotFound
from radixlm.runtime.router.model_row import ModelSpec

TOML = """
[[model]]
source = "b.gguf"
name = "big"
aliases = ["gpt-4o", "*"]
pinned = true
kv-cache-gb = 2
idle-work = false
lora = {sql = "sql-adapter", law = "/"}
strict = true
cors-origin = ["https://a.example", "https://b.example"]
chat-template-kwargs = {enable_thinking = false}

[[model]]
source = "hf:org/name-GGUF:Q4_K_M"
"""


def test_a_folder_has_artifacts_files_and_directories_of_models_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("c.radixlm", "d", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "d" / "config.json").touch()
    (tmp_path / "link.radixlm").symlink_to(tmp_path / "c.radixlm")
    assert [entry.client_name for entry in read_models([str(tmp_path)])] == ["a", "b", "c", "d", "link"]


def test_a_missing_path_is_answered_with_all_that_models_takes() -> None:
    for missing in ("nope.toml", "nope", "nope.gguf"):
        with pytest.raises(ArtifactNotFound, match=f"{missing} does not exist; .* a folder of models, or a TOML file"):
            read_models([missing])


def test_names_and_folders_are_taken_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    given = ["smollm2", str(tmp_path), "hf:org/name:Q8_0", "x.radixlm"]
    assert [entry.client_name for entry in read_models(given)] == ["smollm2", "b", "name-Q8_0", "x"]


def test_a_toml_file_has_models_with_options_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "sql-adapter").mkdir()
    (tmp_path / "models.toml").write_text(TOML)
    big, other = read_models([str(tmp_path / "models.toml")])
    assert (big.client_name, big.aliases, big.is_pinned) == ("big", ("gpt-4o", "*"), True)
    assert big.source == str(tmp_path / "b.gguf"), "beside the file"
    assert big.loras == {"sql": str(tmp_path / "sql-adapter"), "law": "/"}, "beside the file, or elsewhere"
    assert big.flags == [
        *("--lora", f"sql={tmp_path / 'sql-adapter'}", "--lora", "law=/"),
        *("--kv-cache-gb", "2", "--no-idle-work", "--strict"),
        *("--cors-origin", "https://a.example", "--cors-origin", "https://b.example"),
        *("--chat-template-kwargs", '{"enable_thinking": false}'),
    ]
    assert (
        other == ModelEntry(other.source, None, place=other.place, options={})
        and other.client_name == "name-GGUF-Q4_K_M"
    )
    flags = [flag for flag in big.flags if not flag.startswith(("--cors", "https"))]
    params = parsed_flags(command, big.source, flags, big.place)
    assert (params["kv_cache_bytes"], params["idle_work"], params["is_strict"]) == (2_000_000_000, False, True)
    assert params["loras"] == big.loras
    assert params["template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no model"),
        ("x = 1", "has x"),
        ("[[model]]", "model 1: give a source"),
        ("[[model]]\nsource = 1", "model 1: source is 1"),
        ("[[model]]\nsource = 'smollm2'\nname = ''", "names that are not empty"),
        ("[[model]]\nsource = 'smollm2'\naliases = 'a'", "aliases is 'a'; it must be a list of texts"),
        ("[[model]]\nsource = 'smollm2'\npinned = 'yes'", "pinned is 'yes'; it must be true or false"),
        ("[[model]]\nsource = 'smollm2'\npinned = 1", "pinned is 1"),
        ("[[model]]\nsource = 'smollm2'\nlora = 'a=b'", "lora is 'a=b'; it must be a table of paths"),
        ("[[model]]\nsource = 'smollm2'\nlora = {a = 1}", "lora has 'a' = 1; give a name without '=', and a path"),
        ("[[model]]\nsource = 'smollm2'\nlora = {'a=b' = '/'}", "lora has 'a=b' = '/'; give a name without '='"),
        ("[[model]]\nsource = 'smollm2'\nlora = {a = 'b'}", "the LoRA adapter 'a' is 'b', which does not exist"),
        ("model = [1]", "[[model]] tables"),
        ("model = ['smollm2']", "[[model]] tables"),
        ("[[model", "cannot be read"),
    ],
)
def test_a_toml_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(InvalidParameter, match=r"models\.toml") as refused:
        read_models([str(file)])
    assert says in str(refused.value)


def test_what_does_not_exist_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[[model]]\nsource = 'nowhere'")
    with pytest.raises(ArtifactNotFound, match=r"model 1: nowhere does not exist"):
        read_models([str(tmp_path / "models.toml")])
    with pytest.raises(ArtifactNotFound, match="nowhere does not exist"):
        read_models(["nowhere"])
    (tmp_path / "models.toml").unlink()
    with pytest.raises(InvalidParameter, match="has no model; put artifacts"):
        read_models([str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-cache-gbs", "1"], "No such option"),
        (["--kv-cache-gb", "much"], "is not a valid float"),
        (["--port", "1"], "port is for the whole server"),
        (["--model-id", "x"], "model-id is for the whole server"),
        (["--draft", "nowhere"], "does not exist"),
        (["--lora", "adapter"], "give NAME=PATH"),
        (["--store-gb", "1"], "--store-gb is given and --store is not"),
    ],
)
def test_options_of_a_model_are_checked_before_anything_is_loaded(flags: list[str], says: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^models\.toml, model 3: ") as refused:
        parsed_flags(command, "a.radixlm", flags, "models.toml, model 3")
    assert says in str(refused.value)


def test_models_of_a_folder_that_are_unusable_are_left_out_with_a_warning(tmp_path: Path, tiny_artifact: Path) -> None:
    (tmp_path / "broken.gguf").write_text("hello")
    (tmp_path / "empty.radixlm").mkdir()
    (tmp_path / "good.radixlm").symlink_to(tiny_artifact)
    warnings: list[str] = []

    def usable(*given: Path) -> list[str]:
        found = usable_specs(read_models([*map(str, given)]), spec_of, warnings.append)
        return [spec.name for spec in found]

    assert usable(tmp_path) == ["good"]
    assert [warning.partition(" is left out: ")[0] for warning in warnings] == ["broken", "empty"]
    assert "begins with b'hell'" in warnings[0] and "manifest.json" in warnings[1]
    with pytest.raises(SourceNotFound, match="begins with b'hell'"):
        usable(tmp_path / "broken.gguf", tmp_path)
    (tmp_path / "good.radixlm").unlink()
    with pytest.raises(InvalidParameter, match="no model is left to serve"):
        usable(tmp_path)


def spec_of(entry: ModelEntry) -> ModelSpec:
    return ModelSpec(entry.client_name, entry.source)
