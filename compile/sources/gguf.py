"""A GGUF file as a model source, and its tensors as weights, under llama.cpp's names and in its row order.

`gguf_file.py` reads the file, `gguf_settings.py` its metadata, `gguf_blocks.py` its blocks. The model families know
what llama.cpp's converter renames and reorders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import SourceInfo
from radixlm.runtime.artifact.model_config import DenseOutput
from radixlm.runtime.artifact.model_names import whole_stem
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor, UnsupportedTokenizer

from ..families.registry import model_config
from ..weights.kinds import Scales, WeightKind
from ..weights.quantization import Float32, Weight, WeightPlanes, scale_values
from ..weights.view import RowIndex
from .gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, planes_from_blocks, weight_from_blocks
from .gguf_file import NOT_READ, GGUFFile
from .gguf_settings import ROPE_FACTORS, gguf_settings
from .gguf_tokenizer import build_tokenizer_json, vocabulary_from_gguf
from .model_tensors import ModelTensors
from .pairs import scoring_pairs
from .source import END_OF_REPLY, TensorInfo, ends_of_reply, sampling_of_gguf, usable_template
from .text_vectors import (
    WITHOUT_LOGITS,
    embedding_of_gguf,
    giving_hidden_states,
    ranks,
    require_causal,
    reranking_of_gguf,
)


class GGUFTensors:
    """The `StoredTensors` of `file`, without tensors that are scales of others."""

    def __init__(self, file: GGUFFile) -> None:
        """Read the scales of whole tensors. Raises CorruptSource if one is not a single number."""
        self._file = file
        self._factors, self._scales = _whole_tensor_scales(file)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the file; matrices are `[out, in]`."""
        return {
            name: TensorInfo(tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type.name)
            for name, tensor in self._file.tensors.items()
            if name not in self._scales
        }

    def read(self, name: str, rows: RowIndex) -> Weight:
        """Return rows in a form that kernels can hold. Raises CorruptSource if scales are not finite."""
        weight = weight_from_blocks(self._type_of(name), self._blocks(name, rows))
        factor = self._factors.get(name)
        if factor is not None and weight.scales is not None:
            with np.errstate(over="ignore"):
                scales = (scale_values(weight.kind, weight.scales) * factor).astype(np.float16)
            kind = WeightKind(weight.kind.codes, Scales(weight.kind.group))
            weight = replace(weight, kind=kind, scales=scales, is_exact=False)
        self._check_scales(name, weight)
        return weight

    def read_planes(self, name: str, rows: RowIndex) -> WeightPlanes | None:
        """Return the same rows as `read`, codes in bit planes; None if the type has no planes, or `read` rounds.

        Raises CorruptSource if scales are not finite.
        """
        if name in self._factors:
            return None
        planes = planes_from_blocks(self._type_of(name), self._blocks(name, rows))
        if planes is not None:
            self._check_scales(name, planes)
        return planes

    def read_float32(self, name: str, rows: RowIndex) -> Float32:
        """Return the same numbers in float32, before any rounding by `read`."""
        values: Float32 = dequantize(self._blocks(name, rows), GGMLQuantizationType[self._type_of(name)])
        factor = self._factors.get(name)
        return values if factor is None else values * factor

    def _check_scales(self, name: str, weight: Weight | WeightPlanes) -> None:
        """Raise CorruptSource if scales or minima are not finite."""
        for parts in (weight.scales, weight.minima):
            if parts is not None and not np.isfinite(parts).all():
                raise CorruptSource(
                    f"{self._file.path}: {name} ({self._type_of(name)}) has scales that are no numbers or larger than "
                    "float16 holds; fetch it again, or take a Q8_0 or F16 file of the same model"
                )

    def check_type(self, name: str) -> None:
        """Raise UnsupportedTensor if a tensor's type is unsupported."""
        type_name, is_vector = self._type_of(name), self._is_vector(name)
        if type_name not in (PLAIN_TYPES if is_vector else BLOCK_TYPES):
            stored = f"is a vector stored as {type_name}" if is_vector else f"is stored as {type_name}"
            raise UnsupportedTensor(f"{self._file.path}: {name} {stored}, {NOT_READ}")

    def _type_of(self, name: str) -> str:
        """Return the type of a tensor, such as "Q4_K"."""
        return str(self._file.tensors[name].tensor_type.name)

    def _is_vector(self, name: str) -> bool:
        """Return whether a tensor is a vector."""
        return len(self._file.tensors[name].shape) == 1

    def _blocks(self, name: str, rows: RowIndex) -> NDArray[np.uint8]:
        """Return the bytes of some rows; a view of the file if rows are a slice."""
        blocks = self._file.blocks(name)
        if self._is_vector(name):  # plain values, because `check_type` refuses quantized vectors
            values = blocks.reshape(int(self._file.tensors[name].shape[0]), -1)
            return values[rows].reshape(-1)
        return blocks[rows]


def _whole_tensor_scales(file: GGUFFile) -> tuple[dict[str, np.float32], set[str]]:
    """Return the factors of whole NVFP4 matrices, by name, and the names of the tensors that hold them.

    `blk.0.attn_q.scale` belongs to `blk.0.attn_q.weight`. `input_scale` is for kernels that round activations to 4
    bits, and is unused here.
    """
    factors, names = {}, set[str]()
    for name, tensor in file.tensors.items():
        if tensor.tensor_type.name != "NVFP4":
            continue
        stem = name.removesuffix("weight")
        names |= {stem + "scale", stem + "input_scale"}
        scale = file.tensors.get(stem + "scale")
        if scale is None:
            continue
        if scale.tensor_type.name != "F32" or scale.n_elements != 1:
            raise CorruptSource(f"{file.path}: {stem}scale is not one number in F32")
        factors[name] = np.float32(file.blocks(scale.name).view("<f4")[0])
    return factors, names


class GGUFSource(ModelTensors):
    """A model in a `.gguf` file, or in the parts of a split one; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Open the model. Raises SourceNotFound, CorruptSource, UnsupportedArchitecture, -Tensor or -Tokenizer."""
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        self.name = name or whole_stem(path.name)
        settings = gguf_settings(self._file)
        self.embedding = embedding_of_gguf(metadata)
        self.pairs = None
        described = model_config(settings)
        try:
            vocabulary = vocabulary_from_gguf(metadata)
            num_tokens, num_rows = len(vocabulary.tokens), described.vocab_size
            if num_tokens > num_rows:
                raise CorruptSource(f"the tokenizer has {num_tokens} tokens, the embedding {num_rows} rows")
            self.tokenizer_json = build_tokenizer_json(vocabulary)
        except (CorruptSource, UnsupportedTokenizer) as error:
            raise type(error)(f"{path}: {error}") from error
        self.config = described
        if self.embedding is not None:
            self.config = giving_hidden_states(described, _dense_outputs(self._file))
        elif described.score is not None:
            self.config, self.pairs = scoring_pairs(str(path), described, self.tokenizer_json)
        else:
            require_causal(str(path), described)
        stored = GGUFTensors(self._file)
        idle = WITHOUT_LOGITS if self.config.output == "hidden" or ranks(metadata) else ()
        super().__init__(str(path), self.config, "gguf", stored, (*ROPE_FACTORS, *idle))
        for name in sorted(self.used):
            stored.check_type(name)
        self.chat_template = usable_template(metadata.get("tokenizer.chat_template"))
        self.bos_token_id = vocabulary.bos_token_id
        self.add_bos_token = vocabulary.add_bos_token and vocabulary.bos_token_id is not None
        self.eos_token_ids = _eos_token_ids(metadata, vocabulary.tokens)
        self.sampling = sampling_of_gguf(metadata)
        ids = {text: index for index, text in enumerate(vocabulary.tokens) if text in ("yes", "no")}
        is_causal = self.config.output == "logits"
        self.reranking = reranking_of_gguf(metadata, self.name, ids) if is_causal else None
        self.info = SourceInfo(format="gguf", name=self.name, fingerprint=self._file.fingerprint())

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()


def _dense_outputs(file: GGUFFile) -> tuple[DenseOutput, ...]:
    """Return the linear layers behind the pooling of an embedding model, which are numbered from 2 on.

    Raises CorruptSource if one is not a matrix.
    """
    names = (f"dense_{number}" for number in itertools.count(2))
    stored = [*itertools.takewhile(lambda name: f"{name}.weight" in file.tensors, names)]
    vector = next((name for name in stored if len(file.tensors[f"{name}.weight"].shape) != 2), None)
    if vector is not None:
        shape = file.tensors[f"{vector}.weight"].shape.tolist()
        raise CorruptSource(f"{file.path}: {vector}.weight has shape {shape}, it must be a matrix; fetch it again")
    return tuple(
        DenseOutput(size=int(file.tensors[f"{name}.weight"].shape[1]), bias=f"{name}.bias" in file.tensors)
        for name in stored
    )


def _eos_token_ids(metadata: Mapping[str, Any], tokens: list[str] | Any) -> tuple[int, ...]:
    """Return the declared ends of text, turn and message, and the well-known ones in the vocabulary."""
    declared = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    known = {text: index for index, text in enumerate(tokens) if text in END_OF_REPLY}
    ids = [*declared, *(known[text] for text in ends_of_reply(known))]
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int) and 0 <= index < len(tokens)))
