"""The interface of a model source to the compiler, and code that several file formats share.

Tensors have Hugging Face's names and row order, whatever the format. Shared are reading of texts, ends of replies,
sampling defaults, checked values, and one-line errors.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
from radixlm.runtime.artifact.gguf_header import require_content
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING, SamplingDefaults, SourceInfo
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, PairTemplate, RerankingInfo
from radixlm.runtime.errors import CorruptSource

from ..weights.quantization import Float32, Weight, WeightPlanes


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as stored: its shape, and its type under the format's name ("Q4_1", "BF16")."""

    shape: tuple[int, ...]
    type: str


class Source(Protocol):
    """An opened model. Tensors are memory-mapped and read one, or a few rows of one, at a time."""

    @property
    def info(self) -> SourceInfo: ...
    @property
    def name(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer_json(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a reply; the first is the tokenizer's own, if it names one."""
        ...

    @property
    def add_bos_token(self) -> bool: ...
    @property
    def sampling(self) -> SamplingDefaults: ...
    @property
    def embedding(self) -> EmbeddingInfo | None:
        """The way vectors are made of its hidden states; None if it is no embedding model."""
        ...

    @property
    def reranking(self) -> RerankingInfo | None:
        """The way documents are scored by its logits; None if it does not do so."""
        ...

    @property
    def pairs(self) -> PairTemplate | None:
        """The tokens around a query and a document; None if it has no head that scores pairs."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the model, and no other, by its name in a Hugging Face checkpoint."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Weight:
        """Return a tensor, or the rows `[start, stop)` of one, in a form that kernels can hold.

        Raises CorruptSource if scales are not finite, KeyError for a name that `tensors` lacks.
        """
        ...

    def read_planes(self, name: str, rows: slice) -> WeightPlanes | None:
        """Return the same rows as `read`, codes in bit planes; None if there are no planes, or `read` rounds."""
        ...

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        """Return the same numbers in float32, before any rounding by `read`; `rounding_error` compares them."""
        ...

    def release(self) -> None:
        """Release the memory of mapped files; later reads come from the files again."""
        ...

    def close(self) -> None:
        """Unmap the files; arrays that `read` returned stay valid."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


# Texts of tokens that end a reply, whatever the metadata declares (llama.cpp's end-of-generation list).
END_OF_REPLY = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|eot|>",
    "<|user|>",
    "<|observation|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<EOT>",
    "[EOT]",
    "[e~[",  # MiniMax M2
)

# gpt-oss has both; its `<|end|>` ends only a part of a reply, such as reasoning
_ENDS_OF_PARTS = ("<|return|>", "<|call|>")

# Our names by GGUF's after `general.sampling.`, and those of its names that occur in a sequence of samplers.
_GGUF: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "temperature": ("temp", ("temperature", "temp")),
    "top_k": ("top_k", ("top_k", "top-k")),
    "top_p": ("top_p", ("top_p", "top-p", "nucleus")),
    "min_p": ("min_p", ("min_p", "min-p")),
    "repetition_penalty": ("penalty_repeat", ("penalties",)),
}
_NONE = SamplingDefaults()
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)  # a comment of Jinja
_DIGITS = 7  # significant digits of a float32, the type in GGUF

T = TypeVar("T")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without a byte order mark. Raises as `require_content`, or if it is not text."""
    require_content(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptSource(f"{path} is no text in UTF-8 ({error}); fetch it again") from error


def usable_template(template: object) -> str | None:
    """Return a chat template; None if it is missing or renders nothing.

    >>> usable_template("{# none #}\\n") is None
    True
    """
    return template if isinstance(template, str) and _COMMENT.sub("", template).strip() else None


def ends_of_reply(texts: Container[str]) -> list[str]:
    """Return the well-known ends of a reply in a vocabulary.

    >>> ends_of_reply({"<|end|>", "<|user|>"}), ends_of_reply({"<|end|>", "<|return|>", "<|call|>"})
    (['<|end|>', '<|user|>'], ['<|return|>', '<|call|>'])
    """
    has_parts = all(text in texts for text in _ENDS_OF_PARTS)
    return [text for text in END_OF_REPLY if text in texts and not (has_parts and text == "<|end|>")]


def sampling_of_generation_config(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling of transformers, except that missing and null keys have radixlm's defaults.

    >>> sampling_of_generation_config({"do_sample": False, "temperature": 0.6, "top_k": 20.0})
    SamplingDefaults(temperature=0.0, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.0)
    """
    said = {name: generation.get(name) for name in SamplingDefaults.__struct_fields__}
    if generation.get("do_sample") is False:
        said["temperature"] = 0.0
    return _with_usual(said)


def sampling_of_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return llama.cpp's sampling, for supported samplers; a sampler that the sequence omits is disabled.

    >>> sampling_of_gguf({"general.sampling.temp": 0.6, "general.sampling.sequence": "top_k;temperature"}).top_p
    1.0
    """
    said = {name: _short(metadata.get(f"general.sampling.{stored}")) for name, (stored, _) in _GGUF.items()}
    if metadata.get("general.sampling.penalty_last_n") == 0:
        said["repetition_penalty"] = _NONE.repetition_penalty
    sequence = metadata.get("general.sampling.sequence")
    if isinstance(sequence, str) and sequence:
        listed = {part.strip() for part in sequence.split(";")}
        left_out = [name for name, (_, names) in _GGUF.items() if listed.isdisjoint(names)]
        said |= {name: getattr(_NONE, name) for name in left_out}
    return _with_usual(said)


def _with_usual(said: Mapping[str, Any]) -> SamplingDefaults:
    """Return sampling defaults with the given values; values that no sampler can have are ignored."""
    fields = msgspec.to_builtins(USUAL_SAMPLING)
    for name, value in said.items():
        own = int(value) if name == "top_k" and isinstance(value, float) and value.is_integer() else value
        own = max(own, 0) if name == "top_k" and type(own) is int else own  # elsewhere -1 means all
        if own is not None and _is_valid(name, own):
            fields[name] = own
    return msgspec.convert(fields, SamplingDefaults)


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a sampler can have this value."""
    try:
        msgspec.convert({name: value}, SamplingDefaults)
    except msgspec.ValidationError:
        return False
    return True


def _short(value: Any) -> Any:
    """Return a float32 with the digits that people write."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def checked(label: str, values: Mapping[str, Any], type_: type[T]) -> T:
    """Return `values` as `type_`, every number in its range. Raises CorruptSource that names an invalid one."""
    try:
        return msgspec.convert(dict(values), type_)
    except msgspec.ValidationError as error:
        raise CorruptSource(f"{label}: {error}; the source's configuration cannot be right") from error


def one_line(error: Exception) -> str:
    """Return a library's error message in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
