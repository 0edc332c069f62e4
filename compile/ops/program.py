"""A forward pass as a list of kernel calls with addresses in place of tensors. Knows no model and no instruction set.

Addresses are symbols until `module.py` lowers them: an input, a place in the workspace, a weight, a size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..weights.layout import ALIGNMENT, round_up


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
    _places: dict[Hashable, tuple[Place, int]] = field(default_factory=dict)  # with their bytes

    def call(self, key: Hashable, build: Callable[[], Any], *arguments: Argument, is_scoring: bool = False) -> None:
        """Append a call; `build` makes the kernel if no call with this key came before."""
        if key not in self.kernels:
            self.kernels[key] = build()
        self.calls.append(Call(key, arguments, is_scoring))

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
