"""No value of a configuration ends in a traceback: a source is read, or refused in one line."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile.families.registry import FAMILIES as READ
from radixlm.compile.families.registry import model_config
from radixlm.compile.families.settings import Settings
from radixlm.compile.inspection import inspect_source
from radixlm.compile.sources import gguf as gguf_source
from radixlm.compile.sources.gguf import GGUFSource
from radixlm.compile.sources.gguf_file import GGUFFile
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.errors import CorruptSource, SourceError

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES
from .. import wrong_arrays
from ..wrong_arrays import shapes
from .harness import GGUF_NAMES, NAMES

NAN, INFINITE = float("nan"), float("inf")
WRONG = ("x", "", -1, 0, 1, 2.5, 10**12, NAN, INFINITE, True, False, [], [1], ["x"], [{}], [[1]], [None], {}, {"a": 1})
MISSING = object()
WRONG_IN_FILES = ("x", 0, 1, 10**9, 2.5, NAN, [0], [1, 2, 3], True, -3, MISSING)
OFTEN = ("qwen3_moe", "nemotron_h")  # the others wait for `make test-long`


def each(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", each(NAMES))
def test_a_wrong_value_in_config_json_is_one_line(name: str, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for keys in places(config):
        for value in WRONG:
            changed = copy.deepcopy(config)
            place = changed
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = value
            path.write_text(json.dumps(changed), "utf-8")
            read_or_refused(lambda: inspect_source(tmp_path))


@pytest.mark.parametrize("name", each(NAMES))
def test_a_wrong_array_in_a_checkpoint_is_one_line(name: str, tmp_path: Path) -> None:
    """Every tensor of the last layer, and those beside the layers."""
    FAMILIES[name].write(tmp_path)
    arrays = wrong_arrays.arrays_of(tmp_path)
    last = max(int(match[1]) for stored in arrays if (match := re.search(r"layers\.(\d+)\.", stored)))
    kinds = {re.sub(r"experts\.\d+", "experts.0", stored) for stored in arrays}
    for stored in sorted(kinds):
        if f"layers.{last}." in stored or "layers." not in stored:
            array = arrays[stored]
            for wrong in (None, *shapes(array), array.astype(np.int32)):
                wrong_arrays.read_or_refused(tmp_path, arrays, stored, wrong)


@pytest.mark.parametrize("name", each(GGUF_NAMES))
def test_a_wrong_value_in_metadata_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(FAMILIES[name], tmp_path / "tiny.gguf")
    file = GGUFFile(path)
    monkeypatch.setattr(gguf_source, "GGUFFile", lambda path: file)
    right = dict(file.metadata)
    for key in (key for key in right if not key.startswith(("GGUF.", "tokenizer.", "general."))):
        for value in WRONG_IN_FILES:
            file.metadata = {**right, key: value}
            if value is MISSING:
                del file.metadata[key]
            read_or_refused(lambda: GGUFSource(path))


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where values are, those inside of others too."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in places(value))


def read_or_refused(read: Callable[[], object]) -> None:
    try:
        read()
    except SourceError as refused:
        assert "\n" not in str(refused)


def test_the_value_that_is_wrong_is_named() -> None:
    config = {**FAMILIES["qwen3_moe"].config, "decoder_sparse_step": "often"}
    with pytest.raises(
        CorruptSource, match=r"tiny: the configuration cannot be right \(it has decoder_sparse_step 'often'\)"
    ):
        model_config(huggingface_settings("tiny", config))


def test_of_two_that_are_wrong_it_is_said_what_happened() -> None:
    config = {**FAMILIES["qwen3_moe"].config, "decoder_sparse_step": "often", "head_dim": NAN}
    with pytest.raises(CorruptSource, match=r"cannot be right \(cannot convert float NaN to integer\)"):
        model_config(huggingface_settings("tiny", config))


@pytest.mark.parametrize("architecture", list(READ))
def test_a_billion_layers_are_refused_before_they_are_counted(architecture: str) -> None:
    """Nemotron-H's family looked at each to see of what kind it is, and took all memory."""
    for format_ in ("gguf", "huggingface"):
        settings = Settings("tiny", format_, architecture, "", {"num_hidden_layers": 10**9})  # type: ignore[arg-type]
        with suppress(SourceError):  # some find the rest of the configuration missing first
            model_config(settings)
    with pytest.raises(CorruptSource, match="num_hidden_layers is 1000000000, must be 1 to 1024"):
        _ = settings.num_layers
