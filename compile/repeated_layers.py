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

_Positions = Mapping[str, tuple[int, int]]  # by tensor name: the layer, and the index in that layer


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
        _check_same_calls(calls)


def _calls_of_layers(
    program: Program, tensors: Sequence[Sequence[str]]
) -> list[tuple[list[_LayerCall], list[_LayerCall]]]:
    """Return, by layer, its calls and those between it and the next layer.

    A layer's calls are those from the first with a tensor of it to the last.
    """
    positions = {name: (index, place) for index, names in enumerate(tensors) for place, name in enumerate(names)}
    found: list[tuple[list[_LayerCall], list[_LayerCall]]] = [([], []) for _ in tensors]
    current: int | None = None
    for call in program.calls:
        names = [
            name
            for argument in call.arguments
            if isinstance(argument, WeightTensor)
            for name in _layer_tensors(argument, positions)
        ]
        if names:
            current = max(positions[name][0] for name in names)
        if current is None:
            continue
        inside, after = found[current]
        after.append(_comparable_call(call, positions, current))
        if names:
            inside += after
            after.clear()
    return found


def _comparable_call(call: Call, positions: _Positions, layer: int) -> _LayerCall:
    """Return a call in a form that is the same for all layers of its kind."""
    operands = tuple(
        operand for argument in call.arguments for operand in _comparable_operands(argument, positions, layer)
    )
    if isinstance(call.key, ActivationSpec):  # the column of a layer's inputs is compiled in (Gemma 4)
        return _LayerCall(replace(call.key, gate_column=0), (*operands, call.key.gate_column))
    return _LayerCall(call.key, operands)


def _layer_tensors(stored: WeightTensor, positions: _Positions) -> list[str]:
    """Return the names of the layers' tensors that a stored tensor consists of; [] if it belongs to no layer.

    The stored name joins them with `+`, and can end with the name of an array, such as `.scales`.
    """
    last = stored.name.split("+")[-1]
    joined = stored.name if last in positions else stored.name.rpartition(".")[0]
    return [part for part in joined.split("+") if part in positions]


def _comparable_operands(argument: object, positions: _Positions, layer: int) -> tuple[object, ...]:
    """Return an argument of a call of layer `layer` in a form that is the same for all layers of its kind.

    A weight is replaced by the positions of its tensors: layers before or after `layer`, and the index in the layer. Of
    an input, name and offset are returned as two operands, because only the offset, a number, may differ between
    layers.
    """
    if isinstance(argument, Input):
        return argument.name, argument.offset
    if not isinstance(argument, WeightTensor) or not (names := _layer_tensors(argument, positions)):
        return (argument,)
    places = [(positions[name][0] - layer, positions[name][1]) for name in names]
    return ((argument.name.removeprefix("+".join(names)), *places),)


def _check_same_calls(calls: dict[int, list[_LayerCall]]) -> None:
    """Raise unless all these layers call the same kernels with the same arguments as the last of them.

    Only numbers may differ, and must then ascend from layer to layer, like offsets of KV rows.
    """
    first, last = min(calls), max(calls)
    wanted = [_without_numbers(each) for each in calls[last]]
    made = calls | {first: _select_calls(calls[first], wanted)}
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


def _select_calls(calls: Sequence[_LayerCall], wanted: Sequence[tuple[object, ...]]) -> list[_LayerCall]:
    """Return those of `calls` that equal the `wanted` ones without their numbers, in order.

    The first layer also prepares data for all layers, in calls without tensors of its own.
    """
    rest = iter(calls)
    found = [next((each for each in rest if _without_numbers(each) == shape), None) for shape in wanted]
    return [each for each in found if each is not None]


def _without_numbers(each: _LayerCall) -> tuple[object, ...]:
    """Return a call with None for each of its numbers."""
    return each.key, *(None if isinstance(operand, int) else operand for operand in each.operands)
