"""What a model source offers to the compiler, whatever file it comes from.

Tensors have Hugging Face's names and row order, however a format stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from radixlm.runtime.artifact.manifest import SamplingDefaults, SourceInfo
from radixlm.runtime.artifact.model_config import ModelConfig

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
