"""The files of a model in a directory, Hugging Face's or MLC's: their configurations and their arrays.

Knows the content of each file, and converts MLC's configuration to Hugging Face's keys. Does not know what arrays mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from radixlm.runtime.artifact import MANIFEST
from radixlm.runtime.artifact.local_models import (
    CONFIG,
    INDEX,
    MLC_CONFIG,
    WEIGHTS,
    missing_shard,
    no_model,
    no_weights,
)
from radixlm.runtime.errors import CorruptSource, SourceNotFound

from .quantized.mlc import MLC
from .quantized.registry import BESIDE, find_format
from .quantized.tensors import Array, Format
from .source import read_text
from .tensor_files import INDEXES, SafetensorsFile, cached_arrays

GENERATION = "generation_config.json"
Json = Mapping[str, Any]


class ModelFiles(Protocol):
    """The content of a model directory.

    Attributes:
        layout: the tool that wrote the directory.
        config: the configuration under the keys of a `config.json`.
        generation: the same of a `generation_config.json`.
        arrays: arrays by name; access opens their files, which raises SourceNotFound and CorruptSource.
        headers: headers of the files, and sizes in bytes, which together with the beginnings of arrays identify them.
    """

    layout: Literal["huggingface", "mlc"]
    config: Json
    generation: Json

    @property
    def arrays(self) -> Mapping[str, Array]: ...
    @property
    def headers(self) -> list[tuple[bytes, int]]: ...
    def format_for(self, names: Iterable[str]) -> Format | None:
        """Return the format of quantized matrices among these arrays; None if all are plain.

        Raises UnsupportedTensor for an unsupported format.
        """
        ...

    def close(self) -> None: ...


def open_files(path: Path, label: str | None = None) -> ModelFiles:
    """Open the files of a directory, which messages call `label`; files of weights are opened later.

    Raises SourceNotFound if it is no model, CorruptSource if a configuration is damaged.
    """
    if (path / CONFIG).is_file():
        return HuggingFaceFiles(path, label or str(path))
    if (path / MLC_CONFIG).is_file():
        return MLCFiles(path, label or str(path))
    if (path / MANIFEST).is_file():
        raise SourceNotFound(f"{path} is an artifact: it is compiled already; radixlm chat {path} runs it")
    raise no_model(path)


class HuggingFaceFiles:
    """A directory with `config.json` and safetensors."""

    layout: Literal["huggingface", "mlc"] = "huggingface"

    def __init__(self, path: Path, label: str) -> None:
        self._path, self._label = path, label
        self.config: Json = read_json(path / CONFIG)
        self.generation: Json = read_json(path / GENERATION, optional=True)

    @cached_property
    def _files(self) -> list[SafetensorsFile]:
        return _open_weights(self._path)

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: array for file in self._files for name, array in file.tensors.items()}

    @property
    def headers(self) -> list[tuple[bytes, int]]:
        return [(file.header, file.size) for file in self._files]

    def format_for(self, names: Iterable[str]) -> Format | None:
        beside = {name: read_json(self._path / name, optional=True) for name in BESIDE}
        return find_format(self._label, self.config, beside, names)

    def close(self) -> None:
        for file in self._files:
            file.close()


class MLCFiles:
    """A directory with `mlc-chat-config.json` and a tensor cache."""

    layout: Literal["huggingface", "mlc"] = "mlc"

    def __init__(self, path: Path, label: str) -> None:
        self._path, self._label = path, label
        self.generation: Json = read_json(path / MLC_CONFIG)
        self.config: Json = _huggingface_config(path / MLC_CONFIG, self.generation)

    @cached_property
    def _index(self) -> Path:
        """Return the path of the file that lists the tensors.

        Raises:
            SourceNotFound: there is none.
        """
        index = next((self._path / name for name in INDEXES if (self._path / name).is_file()), None)
        if index is None:
            raise SourceNotFound(f"{self._path} is no model that can be read: it has no {' and no '.join(INDEXES)}")
        return index

    @cached_property
    def arrays(self) -> dict[str, Array]:
        return dict(cached_arrays(self._path, read_json(self._index)))

    @property
    def headers(self) -> list[tuple[bytes, int]]:
        return [(json.dumps(read_json(self._index), sort_keys=True).encode(), self._index.stat().st_size)]

    def format_for(self, names: Iterable[str]) -> Format | None:
        return MLC.of(self._label, str(self.generation.get("quantization")))

    def close(self) -> None:
        """Do nothing: arrays are mapped when they are read."""


# MLC's names of settings that differ, by Hugging Face's.
_RENAMED = {
    "rope_theta": "position_embedding_base",
    "max_position_embeddings": "context_window_size",
    "sliding_window": "sliding_window_size",
}


def _huggingface_config(path: Path, chat: Json) -> Json:
    """Return MLC's model configuration under Hugging Face's keys, or that of the language model in it."""
    model = chat.get("model_config")
    if not isinstance(model, Mapping):
        raise CorruptSource(f"{path} has no model_config; fetch it again")
    text = model.get("text_config")
    nested = {"text_config": _renamed(text, {})} if isinstance(text, Mapping) else {}
    ids = {key: chat.get(key) for key in ("bos_token_id", "eos_token_id")}
    about = {"model_type": chat.get("model_type"), "architectures": None}
    return {**_renamed(model, chat), **nested, **ids, **about}


def _renamed(model: Json, chat: Json) -> dict[str, Any]:
    """Return settings under Hugging Face's keys.

    Sizes of -1, which mean that there is none, are left out. Settings without an MLC name may be in `kwargs`.
    """
    more = model.get("kwargs")
    renamed = {key: model.get(own, chat.get(own)) for key, own in _RENAMED.items()}
    given = {key: value for key, value in renamed.items() if value is not None and value != -1}
    return {**(more if isinstance(more, Mapping) else {}), **model, **given}


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; {} for a missing optional file. Raises CorruptSource for anything else."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path), object_hook=_untagged)
    except (ValueError, RecursionError) as error:
        raise CorruptSource(f"{path} is no JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CorruptSource(f"{path} holds no JSON object; fetch it again")
    return value


# these are not JSON, so transformers 5 tags them
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _untagged(value: dict[str, Any]) -> Any:
    """Return an object of a JSON file, or the number that it represents: `{"__float__": "Infinity"}`."""
    tag = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tag, value) if isinstance(tag, str) else value


def _open_weights(path: Path) -> list[SafetensorsFile]:
    """Open the safetensors files of a directory, by its index if there is one."""
    if (path / WEIGHTS).is_file():
        return [SafetensorsFile(path / WEIGHTS)]
    if not (path / INDEX).is_file():
        raise no_weights(path)
    shards = read_index(path / INDEX)
    names = sorted(set(shards.values()))
    for name in names:
        if not (path / name).is_file():
            raise missing_shard(path, name)
    files = [SafetensorsFile(path / name) for name in names]
    stored = {name for file in files for name in file.tensors}
    for name in shards:
        if name not in stored:
            raise CorruptSource(f"{path}: {name} is in no shard, {INDEX} says {shards[name]}; fetch it again")
    return files


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, next to `path`. Raises CorruptSource if the index is damaged."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptSource(f"{path} has no weight_map; fetch it again")
    for name in map(str, weight_map.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptSource(f"{path} names {name!r}, which is no safetensors file beside it")
    return {name: str(file) for name, file in weight_map.items()}
