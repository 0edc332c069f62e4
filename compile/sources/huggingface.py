"""A directory as a model source: Hugging Face's (config.json, safetensors) or MLC's, and a tokenizer.

Knows how a model is assembled, which key names its family, and which part of a multimodal configuration is the language
model. `model_files.py` knows the files; `quantized/` knows the formats of matrices.
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
from .pairs import scoring_pairs
from .quantized.tensors import KINDS, Array, PlainTensor, Tensor, first_bytes, tensors
from .source import sampling_of_generation_config
from .text_vectors import (
    WITHOUT_LOGITS,
    DenseLayers,
    embedding_of_directory,
    giving_hidden_states,
    require_causal,
    reranking_of_directory,
)

_SAMPLE_BYTES = 1024  # bytes of each array that are part of the fingerprint
_OUTPUT = "lm_head"
_COMPARED_ROWS = 1024  # rows compared at once


class HuggingFaceSource(ModelTensors):
    """A model in a directory of safetensors; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Open the model. Raises SourceNotFound if the directory is no model, other SourceErrors for invalid files."""
        self._files = files = open_files(path)
        self.name = name or path.resolve().name
        self._arrays = _without_old_frequencies(files.arrays)
        stored = of_language_model(tensors(str(path), self._arrays, files.format_for(self._arrays)))
        settings = huggingface_settings(str(path), files.config, frozenset(stored))
        family = FAMILIES[settings.architecture]
        stored = {family.usual_name(name): tensor for name, tensor in stored.items()}
        self.embedding = embedding_of_directory(path)
        self.pairs = None
        described = model_config(settings)
        tokenizer = HuggingFaceTokenizer(path, files.config, files.generation, vocab_size=described.vocab_size)
        dense = DenseLayers.of_directory(path)
        if self.embedding is not None:
            described = giving_hidden_states(described, dense.outputs)
            stored |= tensors(str(path), dense.arrays, None)
            self._arrays |= dense.arrays
        elif described.score is not None:
            described, self.pairs = scoring_pairs(str(path), described, tokenizer.json)
        else:
            require_causal(str(path), described)
        decoder = family.decoder(described)
        rows = family.checkpoint_rows(decoder)
        usual = with_hub_names(reshaped(stored, family.transposed, family.flat), rows)
        is_tied = described.output == "logits" and _is_tied(
            str(path), usual, decoder.embed_tokens.name, said=described.tie_word_embeddings
        )
        self.config = replace(described, tie_word_embeddings=is_tied)
        rows = family.checkpoint_rows(family.decoder(self.config))
        named = separated(_without_idle_biases(usual, rows), rows)
        ignored = WITHOUT_LOGITS if is_tied or described.output == "hidden" else ()
        checkpoint = CheckpointTensors(named)
        # both add the one that checkpoints of the hub subtract
        whole_gains = files.layout == "mlc" or _has_taps_of_mlx(self._arrays)
        super().__init__(str(path), self.config, "huggingface", checkpoint, ignored, whole_gains=whole_gains)
        self._check_types(path, named)
        self.tokenizer_json = tokenizer.json
        self.chat_template = tokenizer.chat_template
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_ids = tokenizer.eos_token_ids
        self.add_bos_token = tokenizer.add_bos_token
        self.sampling = sampling_of_generation_config(files.generation)
        is_causal = described.output == "logits"
        self.reranking = reranking_of_directory(path, self.name, tokenizer.ids) if is_causal else None
        self.info = SourceInfo(format=files.layout, name=self.name, fingerprint=self._fingerprint(files.config))

    def release(self) -> None:
        """Do nothing: data that were read are copies."""

    def close(self) -> None:
        self._files.close()

    def _check_types(self, path: Path, named: Mapping[str, Tensor]) -> None:
        """Raise UnsupportedTensor if a tensor of the model has an unsupported type."""
        for name, tensor in ((name, named[name]) for name in sorted(self.used)):
            if not _is_read(tensor):
                raise UnsupportedTensor(
                    f"{path}: {name} is stored as {tensor.info.type}, supported are {', '.join(KINDS)}; "
                    "convert it to one of these, or take a GGUF file"
                )

    def _fingerprint(self, config: Mapping[str, Any]) -> str:
        """Return a digest of configuration, tokenizer, headers, sizes and the beginning of each array."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        digest.update(hashlib.sha256(self.tokenizer_json.encode()).digest())
        for header, size in self._files.headers:
            digest.update(hashlib.sha256(header).digest() + size.to_bytes(8, "little"))
        for name in sorted(self._arrays):
            digest.update(first_bytes(self._arrays[name], _SAMPLE_BYTES))
        return digest.hexdigest()


def _has_taps_of_mlx(arrays: Mapping[str, Array]) -> bool:
    """Return whether taps of convolutions are `[C, K, 1]`: mlx-lm transposes them so, and adds one to gains, too."""
    shapes = (array.shape for name, array in arrays.items() if name.endswith(".conv1d.weight"))
    return any(len(shape) == 3 and shape[-1] == 1 for shape in shapes)


def _without_old_frequencies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays without RoPE's frequencies, which old checkpoints store."""
    return {name: array for name, array in arrays.items() if not name.endswith(".rotary_emb.inv_freq")}


def _is_tied(label: str, named: Mapping[str, Tensor], embedding: str, *, said: bool) -> bool:
    """Return whether the output matrix is the embedding. A stored one that differs is not, whatever is `said`.

    Raises CorruptSource if no output matrix is stored and the embedding is not said to be it.
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
    """Return whether two matrices are equal. Reading stops at the first difference, or if a type is unsupported."""
    if one.info.shape != other.info.shape or not (_is_read(one) and _is_read(other)):
        return False
    starts = range(0, one.info.shape[0], _COMPARED_ROWS)
    blocks = (slice(start, min(start + _COMPARED_ROWS, one.info.shape[0])) for start in starts)
    return all(np.array_equal(one.read_float32(rows), other.read_float32(rows)) for rows in blocks)


def _is_read(tensor: Tensor) -> bool:
    """Return whether a tensor's type is supported."""
    return not isinstance(tensor, PlainTensor) or tensor.info.type in KINDS


def _without_idle_biases(found: dict[str, Tensor], expected: Container[str]) -> dict[str, Tensor]:
    """Drop biases of zeros, which AutoGPTQ writes for each matrix, if the model has no such bias."""

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

# Keys whose null means absent. For all others null is a value: no soft cap, no window, no head_dim.
_POSITIONS = ("rope_parameters", "rope_scaling")

_WITHOUT_OUTPUT = "Model"  # ends names of classes, such as Qwen3Model, that have no output matrix

_CLASSES = {name: key for key, family in FAMILIES.items() for name in family.huggingface}
_NESTED = {type_: key for key, family in FAMILIES.items() for type_ in family.nested}
_CLASS_OF_TYPE = {type_: name for family in FAMILIES.values() for name, type_ in family.huggingface.items()}


def huggingface_settings(label: str, config: Json, stored: frozenset[str] = frozenset()) -> Settings:
    """Return the settings of a config.json. Raises UnsupportedArchitecture for an unknown family."""
    class_name = _class_name(label, config)
    text = config.get("text_config")
    said = [config, text] if isinstance(text, Mapping) else [config]
    given = {key: value for part in said for key, value in part.items() if value is not None or key not in _POSITIONS}
    architecture = _NESTED.get(str(given.get("model_type")), _CLASSES[class_name])
    values = {**FAMILIES[architecture].defaults, **given}
    if any(part.get(TIED) for part in said):  # versions differ in which of the two keys counts
        values[TIED] = True
    return Settings(label, "huggingface", architecture, class_name, values, stored)


def _class_name(label: str, config: Json) -> str:
    """Return the class that a configuration names, or that of its `model_type`."""
    of_type = _CLASS_OF_TYPE.get(str(config.get("model_type")))
    declared = config.get("architectures") or [of_type]
    name = declared[0] if isinstance(declared, list) and declared[0] else config.get("model_type")
    if str(name).endswith(_WITHOUT_OUTPUT) and of_type is not None:
        return of_type
    if isinstance(declared, list) and isinstance(name, str) and name in _CLASSES:
        return name
    raise unsupported(label, name)
