"""What a model source offers to the compiler, and what several file formats share to offer it.

Tensors have Hugging Face's names and row order, however a format stores them. Shared are texts, ends of replies,
sampling defaults, checked values, and errors of one line.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING, SamplingDefaults, SourceInfo
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import CorruptSource, SourceNotFound

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
        """Tokens that end a reply; the first is the tokenizer's own, if it names one."""
        ...

    @property
    def add_bos_token(self) -> bool: ...
    @property
    def sampling(self) -> SamplingDefaults: ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the model, and no other, by its name in a Hugging Face checkpoint."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Weight:
        """A tensor, or the rows `[start, stop)` of one, as the kernels can hold it.

        Raises CorruptSource where scales are not finite, KeyError for a name that `tensors` lacks.
        """
        ...

    def read_planes(self, name: str, rows: slice) -> WeightPlanes | None:
        """The numbers of `read` without a byte for each code; None if only `read` has them, or rounds them."""
        ...

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        """The same numbers in float32, before any rounding by `read`: what `rounding_error` compares."""
        ...

    def release(self) -> None:
        """Let go of the memory that mapped files take; what is read later comes from the files again."""
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

_POINTER = b"version https://git-lfs"  # how the file begins that stands for another one in git
_ENDS_OF_PARTS = ("<|return|>", "<|call|>")  # gpt-oss has both: there `<|end|>` ends a part of a reply, as a thought is

# Our names, by GGUF's behind `general.sampling.`; of those, its names in a sequence of samplers.
_GGUF: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "temperature": ("temp", ("temperature", "temp")),
    "top_k": ("top_k", ("top_k", "top-k")),
    "top_p": ("top_p", ("top_p", "top-p", "nucleus")),
    "min_p": ("min_p", ("min_p", "min-p")),
    "repetition_penalty": ("penalty_repeat", ("penalties",)),
}
_NONE = SamplingDefaults()
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)  # of Jinja
_DIGITS = 7  # of a float32, which is what GGUF stores

T = TypeVar("T")


def require_content(path: Path) -> None:
    """Raise SourceNotFound for a file that cannot be read, CorruptSource where git has only a pointer to it."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    if begin == _POINTER:
        raise CorruptSource(
            f"{path} is a Git LFS pointer, not the file that it stands for; run git lfs pull in {path.parent}"
        )


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark; raises as `require_content`, and where it is none."""
    require_content(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptSource(f"{path} is no text in UTF-8 ({error}); fetch it again") from error


def usable_template(template: object) -> str | None:
    """A chat template; None for one that is missing or renders nothing, so that the model has none.

    >>> usable_template("{# none #}\\n") is None
    True
    """
    return template if isinstance(template, str) and _COMMENT.sub("", template).strip() else None


def ends_of_reply(texts: Container[str]) -> list[str]:
    """The well-known ends of a reply in a vocabulary.

    >>> ends_of_reply({"<|end|>", "<|user|>"}), ends_of_reply({"<|end|>", "<|return|>", "<|call|>"})
    (['<|end|>', '<|user|>'], ['<|return|>', '<|call|>'])
    """
    has_parts = all(text in texts for text in _ENDS_OF_PARTS)
    return [text for text in END_OF_REPLY if text in texts and not (has_parts and text == "<|end|>")]


def sampling_of_generation_config(generation: Mapping[str, Any]) -> SamplingDefaults:
    """What transformers would do, but that keys which are missing or null are not said.

    >>> sampling_of_generation_config({"do_sample": False, "temperature": 0.6, "top_k": 20.0})
    SamplingDefaults(temperature=0.0, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.0)
    """
    said = {name: generation.get(name) for name in SamplingDefaults.__struct_fields__}
    if generation.get("do_sample") is False:
        said["temperature"] = 0.0
    return _with_usual(said)


def sampling_of_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """What llama.cpp would do, of the samplers that are known here; one that a sequence leaves out does nothing.

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
    """A value that no sampler can have is as if it were not said: it is no part of the model."""
    fields = msgspec.to_builtins(USUAL_SAMPLING)
    for name, value in said.items():
        own = int(value) if name == "top_k" and isinstance(value, float) and value.is_integer() else value
        own = max(own, 0) if name == "top_k" and type(own) is int else own  # -1 is all elsewhere
        if own is not None and _is_valid(name, own):
            fields[name] = own
    return msgspec.convert(fields, SamplingDefaults)


def _is_valid(name: str, value: Any) -> bool:
    try:
        msgspec.convert({name: value}, SamplingDefaults)
    except msgspec.ValidationError:
        return False
    return True


def _short(value: Any) -> Any:
    """A float32 as people write it."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def checked(label: str, values: Mapping[str, Any], type_: type[T]) -> T:
    """`values` as `type_`, every number in its range; raises CorruptSource that names one which is not."""
    try:
        return msgspec.convert(dict(values), type_)
    except msgspec.ValidationError as error:
        raise CorruptSource(f"{label}: {error}; the source's configuration cannot be right") from error


def one_line(error: Exception) -> str:
    """What a library's error says, in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
