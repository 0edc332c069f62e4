"""A forward pass as a list of kernel calls with symbolic addresses, and the row buffers between operations.

`module.py` lowers addresses: an input, a place in the workspace, a weight, a size. Rows are numbers, or functions of
rows that run later. Knows no model and no instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..kernels.activation import Function, Gate
from ..kernels.experts.entries import ExpertLimits
from ..weights.layout import ALIGNMENT, ROW_BLOCK, round_up


@dataclass(frozen=True)
class Input:
    """An argument of `forward` or `forward_scored`, by name, from its element `offset` on."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Scratch:
    """Bytes of the workspace, from `offset` on."""

    offset: int


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of weights.safetensors, by name."""

    name: str


@dataclass(frozen=True)
class Size:
    """A number that is known when `forward` is called, such as `num_tokens`, multiplied by `times`."""

    name: str
    times: int = 1


Argument = Input | Scratch | WeightTensor | Size | int


@dataclass(frozen=True)
class Call:
    """A call `kernel(*arguments)`; kernels with equal keys are the same function."""

    key: Hashable
    arguments: tuple[Argument, ...]
    is_scoring: bool = False  # only `forward_scored` calls it


@dataclass
class Program:
    """Calls in order, their kernels, and the scratch memory that they share."""

    calls: list[Call] = field(default_factory=list)
    kernels: dict[Hashable, Any] = field(default_factory=dict)
    workspace_bytes: int = 0
    drafts: dict[str, Program] = field(default_factory=dict)  # the programs of an MTP head, by entry point
    _scratch: dict[Hashable, tuple[Scratch, int]] = field(default_factory=dict)  # with their sizes in bytes

    def call(self, key: Hashable, build: Callable[[], Any], *arguments: Argument, is_scoring: bool = False) -> None:
        """Append a call; `build` makes the kernel if no earlier call had this key."""
        if key not in self.kernels:
            self.kernels[key] = build()
        self.calls.append(Call(key, arguments, is_scoring))

    def add_draft(self, entry_point: str, draft: Program) -> None:
        """Add a program of its own for an entry point; the kernels are joined, and the larger workspace serves all."""
        self.drafts[entry_point] = draft
        self.kernels |= draft.kernels
        programs = (self, *self.drafts.values())
        size = max(program.workspace_bytes for program in programs)
        for program in programs:
            program.workspace_bytes = size

    def scratch(self, role: Hashable, num_bytes: int) -> Scratch:
        """Return scratch memory for a role; calls with the same role get the same bytes, layer after layer.

        Earlier contents are overwritten: data that are needed at the same time need two roles.
        """
        if role not in self._scratch:
            self._scratch[role] = (Scratch(self.workspace_bytes), num_bytes)
            self.workspace_bytes += round_up(num_bytes, ALIGNMENT)
        scratch, size = self._scratch[role]
        assert num_bytes == size, f"{role} has {size} bytes, {num_bytes} are asked for"
        return scratch


@dataclass(frozen=True)
class Limits:
    """The largest sizes of one forward."""

    num_tokens: int
    num_logits: int
    context_length: int


@dataclass(frozen=True)
class EntryPlaces:
    """The order of rows that are entries of experts; `memory` is the output of `find_slabs`."""

    memory: Scratch
    limits: ExpertLimits


@dataclass(frozen=True)
class RowBuffer:
    """A buffer of float32 `[rows, stride]` in the workspace (or the logits).

    `columns` are the first columns of joined outputs. Rows follow one another, or are at `places`, which are not all
    used.
    """

    memory: Argument
    stride: int
    columns: tuple[int, ...]
    num_rows: Size
    max_rows: int
    places: EntryPlaces | None = None

    @classmethod
    def of_tokens(
        cls, program: Program, limits: Limits, role: Hashable, width: int, columns: tuple[int, ...] = (0,)
    ) -> RowBuffer:
        """Return a row for each token of the step, in the workspace's memory for `role` and width."""
        stride, most = round_up(width, ROW_BLOCK), limits.num_tokens
        return cls(program.scratch((role, stride), most * stride * 4), stride, columns, Size("num_tokens"), most)


@dataclass(frozen=True)
class Gates:
    """A factor of an activation: a function of other rows, with a gate for each `width` elements from `column` on."""

    function: Gate
    rows: RowBuffer
    column: int = 0
    width: int = 1


@dataclass
class Activation:
    """A function of rows. It is computed when a matrix product needs it, as floats or as codes.

    `gain` is that of a norm, 0 if it has none; with `has_bias`, the bias follows it.
    """

    function: Function
    rows: RowBuffer
    width: int
    gain: Argument
    eps: float
    floats: Scratch | None = None
    codes: dict[bool, tuple[Scratch, Scratch, Scratch]] = field(default_factory=dict)  # codes by whether they are wide
    role: Hashable = ""  # activations of different roles have separate memory
    has_bias: bool = False
    gates: Gates | None = None

    @property
    def is_rows(self) -> bool:
        """True if the activation is the rows themselves, with nothing to compute."""
        return self.function == "identity" and self.gates is None

    @property
    def float_stride(self) -> int:
        """Row stride of the result in numbers, if it is floats."""
        return self.rows.stride if self.is_rows else round_up(self.width, ROW_BLOCK)
