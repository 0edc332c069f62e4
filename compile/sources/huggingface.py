"""A directory as a model source: Hugging Face's (config.json, safetensors) or MLC's, and a tokenizer.

Knows how a model is put together, where a family is named, and where the language model of a larger one is described;
`model_files.py` knows which file holds what, and `quantized/` what matrices are stored as.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from radixlm.runtime.artifact.manifest import SourceInfo
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ..families.registry import FAMILIES, model_config, unsupported
from ..families.settings import Settings
from ..layers.part_names import parts_of
from .checkpoint_tensors import CheckpointTensors, of_language_model, reshaped, separated, with_hub_names
from .huggingface_tokenizer import HuggingFaceTokenizer
from .model_files import open_files
from .model_tensors import ModelTensors
from .quantized.tensors import KINDS, Array, PlainTensor, Tensor, first_bytes, tensors
from .source import sampling_of_generation_config

_SAMPLE_BYTES = 1024  # of each tensor, in the fingerprint
_OUTPUT = "lm_head"
_COMPARED_ROWS = 1024  # at once


class HuggingFaceSource(ModelTensors):
    """A model in a directory of safetensors; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises SourceNotFound where the directory is no model, other SourceErrors for what is wrong."""
        self._files = files = open_files(path)
        self.name = name or path.resolve().name
        self._arrays = _without_old_frequencies(files.arrays)
        stored = of_language_model(tensors(str(path), self._arrays, files.format_for(self._arrays)))
        settings = huggingface_settings(str(path), files.config, frozenset(stored))
        described = model_config(settings)
        family = FAMILIES[settings.architecture]
        decoder = family.decoder(described)
        rows = family.checkpoint_rows(decoder)
        usual = with_hub_names(reshaped(stored, family.transposed, family.flat), rows)
        is_tied = _is_tied(str(path), usual, decoder.embed_tokens.name, said=described.tie_word_embeddings)
        self.config = replace(described, tie_word_embeddings=is_tied)
        rows = family.checkpoint_rows(family.decoder(self.config))
        named = separated(_without_idle_biases(usual, rows), rows)
        ignored = (f"{_OUTPUT}.*",) if is_tied else ()
        checkpoint = CheckpointTensors(named)
        whole_gains = files.layout == "mlc" or _has_taps_of_mlx(self._arrays)  # both add what the hub leaves out
        super().__init__(str(path), self.config, "huggingface", checkpoint, ignored, whole_gains=whole_gains)
        self._check_types(path, named)
        tokenizer = HuggingFaceTokenizer(path, files.config, files.generation, vocab_size=self.config.vocab_size)
        self.tokenizer_json = tokenizer.json
        self.chat_template = tokenizer.chat_template
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_ids = tokenizer.eos_token_ids
        self.add_bos_token = tokenizer.add_bos_token
        self.sampling = sampling_of_generation_config(files.generation)
        self.info = SourceInfo(format=files.layout, name=self.name, fingerprint=self._fingerprint(files.config))

    def release(self) -> None:
        """Nothing: what was read are copies."""

    def close(self) -> None:
        self._files.close()

    def _check_types(self, path: Path, named: Mapping[str, Tensor]) -> None:
        for name, tensor in ((name, named[name]) for name in sorted(self.used)):
            if not _is_read(tensor):
                raise UnsupportedTensor(
                    f"{path}: {name} is stored as {tensor.info.type}, supported are {', '.join(KINDS)}; "
                    "convert it to one of these, or take a GGUF file"
                )

    def _fingerprint(self, config: Mapping[str, Any]) -> str:
        """Over configuration, tokenizer, headers, sizes and the beginning of each array."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        digest.update(hashlib.sha256(self.tokenizer_json.encode()).digest())
        for header, size in self._files.headers:
            digest.update(hashlib.sha256(header).digest() + size.to_bytes(8, "little"))
        for name in sorted(self._arrays):
            digest.update(first_bytes(self._arrays[name], _SAMPLE_BYTES))
        return digest.hexdigest()


def _has_taps_of_mlx(arrays: Mapping[str, Array]) -> bool:
    """Whether taps of convolutions lie as `[C, K, 1]`: where mlx-lm turns them so, it adds one to gains, too."""
    shapes = (array.shape for name, array in arrays.items() if name.endswith(".conv1d.weight"))
    return any(len(shape) == 3 and shape[-1] == 1 for shape in shapes)


def _without_old_frequencies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays without RoPE's frequencies, which old checkpoints store."""
    return {name: array for name, array in arrays.items() if not name.endswith(".rotary_emb.inv_freq")}


def _is_tied(label: str, named: Mapping[str, Tensor], embedding: str, *, said: bool) -> bool:
    """Whether the output matrix is the embedding: if it is stored and is another, it is not, whatever is `said`.

    Raises CorruptSource where none is stored and none is said to be the embedding.
    """
    output = named.get(f"{_OUTPUT}.weight")
    if output is None:
        if not said:
            raise CorruptSource(
                f"{label}: {_OUTPUT}.weight is missing, and the configuration does not say that it is the embedding; "
                'add "tie_word_embeddings": true if it is, else fetch the file again'
            )
        return True
    return said and embedding in named and _are_alike(output, named[embedding])


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices have the same numbers; reading ends where they do not, or where a type is not read."""
    if one.info.shape != other.info.shape or not (_is_read(one) and _is_read(other)):
        return False
    starts = range(0, one.info.shape[0], _COMPARED_ROWS)
    blocks = (slice(start, min(start + _COMPARED_ROWS, one.info.shape[0])) for start in starts)
    return all(np.array_equal(one.read_float32(rows), other.read_float32(rows)) for rows in blocks)


def _is_read(tensor: Tensor) -> bool:
    return not isinstance(tensor, PlainTensor) or tensor.info.type in KINDS


def _without_idle_biases(found: dict[str, Tensor], expected: Container[str]) -> dict[str, Tensor]:
    """The tensors without the zeros that AutoGPTQ writes as a bias of each matrix, where the model has none."""

    def is_idle(name: str) -> bool:
        stem = name.removesuffix(".bias")
        beside = found.get(f"{stem}.weight")
        is_expected = name in expected or any(part in expected for part in parts_of(name))
        if name == stem or is_expected or beside is None or isinstance(beside, PlainTensor):
            return False
        return found[name].info.type in KINDS and not found[name].read_float32().any()

    return {name: tensor for name, tensor in found.items() if not is_idle(name)}


Json = Mapping[str, Any]
TIED = "tie_word_embeddings"

# Where null is as if the key were not there. Of all others it is a value: no soft cap, no window, no head_dim.
_POSITIONS = ("rope_parameters", "rope_scaling")

_CLASSES = {name: key for key, family in FAMILIES.items() for name in family.huggingface}
_NESTED = {type_: key for key, family in FAMILIES.items() for type_ in family.nested}
_CLASS_OF_TYPE = {type_: name for family in FAMILIES.values() for name, type_ in family.huggingface.items()}


def huggingface_settings(label: str, config: Json, stored: frozenset[str] = frozenset()) -> Settings:
    """Raises UnsupportedArchitecture for a family that is not known."""
    class_name = _class_name(label, config)
    text = config.get("text_config")
    said = [config, text] if isinstance(text, Mapping) else [config]
    given = {key: value for part in said for key, value in part.items() if value is not None or key not in _POSITIONS}
    architecture = _NESTED.get(str(given.get("model_type")), _CLASSES[class_name])
    values = {**FAMILIES[architecture].defaults, **given}
    if any(part.get(TIED) for part in said):  # which of the two counts was not the same in all versions
        values[TIED] = True
    return Settings(label, "huggingface", architecture, class_name, values, stored)


def _class_name(label: str, config: Json) -> str:
    declared = config.get("architectures") or [_CLASS_OF_TYPE.get(str(config.get("model_type")))]
    name = declared[0] if isinstance(declared, list) and declared[0] else config.get("model_type")
    if isinstance(declared, list) and isinstance(name, str) and name in _CLASSES:
        return name
    raise unsupported(label, name)
