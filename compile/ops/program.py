"""A forward pass as a list of kernel calls with addresses in place of tensors, and the rows that operations hand on.

Addresses are symbols until `module.py` lowers them: an input, a place in the workspace, a weight, a size. Rows are
numbers, or functions of rows that run later. Knows no model and no instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..kernels.activation import Function, Gate
from ..weights.layout import ALIGNMENT, ROW_BLOCK, round_up


@dataclass(frozen=True)
class Input:
    """One of the arguments of `forward`, or of `forward_scored`, by name."""

    name: str


@dataclass(frozen=True)
class Place:
    """Bytes of the workspace, from `offset`."""

    offset: int


@dataclass(frozen=True)
class Stored:
    """A tensor of weights.safetensors, by name."""

    name: str


@dataclass(frozen=True)
class Size:
    """A number that is known when `forward` is called, such as `num_tokens`, `times` over."""

    name: str
    times: int = 1


Argument = Input | Place | Stored | Size | int


@dataclass(frozen=True)
class Call:
    """`kernel(*arguments)`; kernels with equal keys are the same function."""

    key: Hashable
    arguments: tuple[Argument, ...]
    is_scoring: bool = False  # only `forward_scored` calls it


@dataclass
class Program:
    """Calls in order, the kernels they need, and the scratch memory in which they meet."""

    calls: list[Call] = field(default_factory=list)
    kernels: dict[Hashable, Any] = field(default_factory=dict)
    workspace_bytes: int = 0
    draft: Program | None = None  # what `draft` computes, of models with an MTP head
    _places: dict[Hashable, tuple[Place, int]] = field(default_factory=dict)  # with their bytes

    def call(self, key: Hashable, build: Callable[[], Any], *arguments: Argument, is_scoring: bool = False) -> None:
        """Append a call; `build` makes the kernel if no call with this key came before."""
        if key not in self.kernels:
            self.kernels[key] = build()
        self.calls.append(Call(key, arguments, is_scoring))

    def add_draft(self, draft: Program) -> None:
        """Have a second program for `draft`: with kernels of both, in a workspace that is large enough for each."""
        self.draft = draft
        self.kernels |= draft.kernels
        self.workspace_bytes = draft.workspace_bytes = max(self.workspace_bytes, draft.workspace_bytes)

    def place(self, role: Hashable, num_bytes: int) -> Place:
        """Scratch memory for a role; calls with the same role get the same bytes, layer after layer.

        What was there before is overwritten: two things that are needed at once have two roles.
        """
        if role not in self._places:
            self._places[role] = (Place(self.workspace_bytes), num_bytes)
            self.workspace_bytes += round_up(num_bytes, ALIGNMENT)
        place, size = self._places[role]
        assert num_bytes == size, f"{role} has {size} bytes, {num_bytes} are asked for"
        return place


@dataclass(frozen=True)
class Limits:
    """The most that one forward takes."""

    num_tokens: int
    num_logits: int
    context_length: int


@dataclass(frozen=True)
class Rows:
    """float32 `[rows, stride]` in the workspace (or the logits); `columns` are where joined outputs begin."""

    memory: Argument
    stride: int
    columns: tuple[int, ...]
    num_rows: Size
    max_rows: int

    @classmethod
    def of_tokens(
        cls, program: Program, limits: Limits, role: Hashable, width: int, columns: tuple[int, ...] = (0,)
    ) -> Rows:
        """A row for each token of the step, in the workspace's place for `role` and width."""
        stride, most = round_up(width, ROW_BLOCK), limits.num_tokens
        return cls(program.place((role, stride), most * stride * 4), stride, columns, Size("num_tokens"), most)


@dataclass(frozen=True)
class Gates:
    """What multiplies an activation: a function of other rows, whose `column` on holds a gate for `width` elements."""

    function: Gate
    rows: Rows
    column: int = 0
    width: int = 1


@dataclass
class Activation:
    """A function of rows. It is computed when a linear needs it, as floats or as codes.

    `gain` is a norm's, 0 if it has none; with `has_bias`, the bias stands behind it.
    """

    function: Function
    rows: Rows
    width: int
    gain: Argument
    eps: float
    floats: Place | None = None
    codes: dict[bool, tuple[Place, Place, Place]] = field(default_factory=dict)  # by whether they are wide
    role: Hashable = ""  # activations of different roles have places of their own
    has_bias: bool = False
    gates: Gates | None = None

    @property
    def is_rows(self) -> bool:
        """Whether nothing is to be computed."""
        return self.function == "identity" and self.gates is None

    @property
    def float_stride(self) -> int:
        """Numbers from one row of the result to the next, where it is floats."""
        return self.rows.stride if self.is_rows else round_up(self.width, ROW_BLOCK)
