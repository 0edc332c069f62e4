"""Check that layers of one kind make the same calls, each with its own tensors, KV and states.

The logits of one layer of each kind are compared with NumPy. This check shows that they represent the others: a
difference in the program of another layer is found here, at no cost. Knows calls and names, not numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from radixlm.runtime.errors import VerificationFailed

from .kernels.activation import ActivationSpec
from .ops.program import Call, Input, Program, WeightTensor

_Own = Mapping[str, tuple[int, int]]  # layer and index in that layer of each tensor, by name


class _LayerCall(NamedTuple):
    """A call in the form common to all layers of a kind: tensors by their index in the layer, and other operands."""

    key: Hashable
    operands: tuple[object, ...]


def check_repeated(program: Program, tensors: Sequence[Sequence[str]], kinds: Sequence[Sequence[int]]) -> None:
    """Compare the calls of all layers of a kind, and those between two layers of the same kinds.

    Args:
        tensors: the names of each layer's tensors, in the same order for layers of one kind.
        kinds: indices of layers of each kind, ascending.

    Raises:
        VerificationFailed: they differ.
    """
    kind_of = {index: number for number, kind in enumerate(kinds) for index in kind}
    alike: dict[object, dict[int, list[_LayerCall]]] = defaultdict(dict)
    for index, (inside, after) in enumerate(_calls_of_layers(program, tensors)):
        alike[kind_of[index]][index] = inside
        if index + 1 in kind_of:  # after the last layer come the logits
            alike[kind_of[index], kind_of[index + 1]][index] = after
    for calls in alike.values():
        _check_alike(calls)


def _calls_of_layers(
    program: Program, tensors: Sequence[Sequence[str]]
) -> list[tuple[list[_LayerCall], list[_LayerCall]]]:
    """Return the calls of each layer, and those up to the next layer.

    A layer's calls are those from the first with a tensor of it to the last.
    """
    own = {name: (index, place) for index, names in enumerate(tensors) for place, name in enumerate(names)}
    found: list[tuple[list[_LayerCall], list[_LayerCall]]] = [([], []) for _ in tensors]
    current: int | None = None
    for call in program.calls:
        names = [
            name for argument in call.arguments if isinstance(argument, WeightTensor) for name in _names(argument, own)
        ]
        if names:
            current = max(own[name][0] for name in names)
        if current is None:
            continue
        inside, after = found[current]
        after.append(_as_of_kind(call, own, current))
        if names:
            inside += after
            after.clear()
    return found


def _as_of_kind(call: Call, own: _Own, layer: int) -> _LayerCall:
    """Return a call in the form common to all layers of its kind."""
    operands = tuple(operand for argument in call.arguments for operand in _operands(argument, own, layer))
    if isinstance(call.key, ActivationSpec):  # the column of a layer's inputs is compiled in (Gemma 4)
        return _LayerCall(replace(call.key, gate_column=0), (*operands, call.key.gate_column))
    return _LayerCall(call.key, operands)


def _names(stored: WeightTensor, own: _Own) -> list[str]:
    """Return the layers' tensors that are joined in a stored one; a suffix of its name for an array is ignored."""
    last = stored.name.split("+")[-1]
    joined = stored.name if last in own else stored.name.rpartition(".")[0]
    return [part for part in joined.split("+") if part in own]


def _operands(argument: object, own: _Own, layer: int) -> tuple[object, ...]:
    """Return an argument in the form common to all layers: a tensor by its position in its layer, an offset apart."""
    if isinstance(argument, Input):
        return argument.name, argument.offset
    if not isinstance(argument, WeightTensor) or not (names := _names(argument, own)):
        return (argument,)
    places = [(own[name][0] - layer, own[name][1]) for name in names]
    return ((argument.name.removeprefix("+".join(names)), *places),)


def _check_alike(calls: dict[int, list[_LayerCall]]) -> None:
    """Raise unless kernels and arguments equal those of the last of these layers; numbers may be its row offsets."""
    first, last = min(calls), max(calls)
    wanted = [_without_numbers(each) for each in calls[last]]
    made = calls | {first: _found_among(calls[first], wanted)}
    extra = [each for each in calls[first] if all(each is not one for one in made[first])]
    if any(isinstance(operand, tuple) for each in extra for operand in each.operands):
        raise VerificationFailed(
            f"layer {last} calls other kernels than layer {first}, which is of the same kind: it leaves a tensor out; "
            "nothing was published. Please report the model"
        )
    for index, some in made.items():
        if [_without_numbers(each) for each in some] != wanted:
            raise VerificationFailed(
                f"layer {index} calls other kernels than layer {last}, which is of the same kind, or with other "
                "arguments; nothing was published. Please report the model"
            )
    for same in zip(*made.values(), strict=True):
        for values in zip(*(each.operands for each in same), strict=True):
            numbers = [value for value in values if isinstance(value, int)]
            if len({*numbers}) > 1 and not all(low < high for low, high in pairwise(numbers)):
                raise VerificationFailed(
                    f"layers {', '.join(map(str, made))} have their rows at {', '.join(map(str, numbers))}, where some "
                    "are the same or out of order; nothing was published. Please report the model"
                )


def _found_among(calls: Sequence[_LayerCall], wanted: Sequence[tuple[object, ...]]) -> list[_LayerCall]:
    """Return the wanted calls, in order. The first layer also prepares data for all, without tensors of its own."""
    rest = iter(calls)
    found = [next((each for each in rest if _without_numbers(each) == shape), None) for shape in wanted]
    return [each for each in found if each is not None]


def _without_numbers(each: _LayerCall) -> tuple[object, ...]:
    """Return a call without its numbers."""
    return each.key, *(None if isinstance(operand, int) else operand for operand in each.operands)
