"""Compile a program into the artifact's library: `forward`, sampling kernels, and functions that move KV.

`forward` is one PrimFunc that calls the kernels directly: no virtual machine, no allocation, every state tensor an
argument. `forward_scored` calls the same kernels and, between them, those that score KV rows. The offsets of weights
are compiled in. Types, shapes and, in `forward`, all indices are checked before a kernel runs; an invalid argument
raises, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
from radixlm.runtime.artifact.lora import LoraInfo
from radixlm.runtime.artifact.manifest import MAX_POSITION, PAGE_SIZE, TOP_LOGITS, WEIGHT_BLOCK, KVLayout
from radixlm.runtime.artifact.model_config import STATE_ITEM_BYTES, ModelConfig
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .codegen.kernel_cache import KernelCache
from .codegen.library import Library, build_library, kernel_symbol
from .codegen.targets import Target
from .codegen.vector import LANES, storage_type
from .kernels.float_linear import DTYPES
from .kernels.kv_pool import KV_DTYPES, copy_rows, move_pages
from .kernels.sampling.top_k import num_maxima, top_k
from .kernels.sampling.weight_sums import weight_sums
from .machine_limits import LIMIT_LOOPS
from .ops.program import Argument, Input, Program, Scratch, Size, WeightTensor
from .weights.layout import ROW_BLOCK, round_up
from .weights.plan import WeightPlan

ENTRY_POINTS = (
    *("forward", "top_logits", "weight_sums", "copy_pages", "read_pages", "write_pages", "set_num_threads"),
    *LIMIT_LOOPS,
)
SCORED = "forward_scored"  # only for models that support approximate KV loading
DRAFT = "draft"  # only for models with an MTP head: has `forward`'s arguments, and computes the head alone
DRAFT_FREQUENT = "draft_frequent"  # `draft` among the first tokens of a large vocabulary, which are the most frequent
_NUM_FREQUENT = 32768  # 93 to 96 % of the tokens of English text and code (bench/LOG.md)


def build_module(
    program: Program,
    plan: WeightPlan,
    config: ModelConfig,
    layout: KVLayout,
    max_num_tokens: int,
    target: Target,
    cache: KernelCache,
    report: Callable[[int, int], None] = lambda *_: None,
    lora: LoraInfo | None = None,
) -> Library:
    """Return the compiled library with `entry_points`; `report(done, total)` counts compiled functions."""
    symbols = {key: kernel_symbol(kernel, target) for key, kernel in program.kernels.items()}
    functions = list(program.kernels.values())
    for name, of_entry in {"forward": program, SCORED: program, **program.drafts}.items():
        if name in entry_points(config):
            functions.append(
                _forward(name, of_entry, plan, config, layout, max_num_tokens, symbols, lora, is_scored=name == SCORED)
            )
    others: tuple[tuple[Any, Callable[[str], Any]], ...] = (
        (top_k(TOP_LOGITS), lambda symbol: _top_logits(config, symbol)),
        (weight_sums(target), lambda symbol: _weight_sums(config, symbol)),
        (copy_rows(layout), lambda symbol: _copy_pages("copy_pages", layout, symbol)),
        (move_pages(layout, into_pool=False), lambda symbol: _move_pages("read_pages", layout, symbol)),
        (move_pages(layout, into_pool=True), lambda symbol: _move_pages("write_pages", layout, symbol)),
    )
    others += tuple((loop(target), partial(_limit_loop, name)) for name, loop in LIMIT_LOOPS.items())
    for kernel, entry in others:
        functions += [kernel, entry(kernel_symbol(kernel, target))]
    return build_library(functions, target, cache, report)


def entry_points(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a model's exported functions."""
    scored = () if config.why_not_partial else (SCORED,)
    return (*ENTRY_POINTS[:1], *scored, *drafts(config), *ENTRY_POINTS[1:])


def drafts(config: ModelConfig) -> dict[str, int | None]:
    """Return the entry points of an MTP head, and the number of first tokens among which each drafts; None: all."""
    if config.mtp is None:
        return {}
    frequent = {DRAFT_FREQUENT: _NUM_FREQUENT} if config.vocab_size >= 2 * _NUM_FREQUENT else {}
    return {DRAFT: None, **frequent}


_Arguments = dict[str, tuple[str, tuple[int | str, ...] | None]]
"""The dtype and shape of each argument; symbolic dimensions are names, and without a shape it is an integer."""


@dataclass
class _Entry:
    """An exported function: its integers and symbolic dimensions, and its tensors."""

    name: str
    sizes: dict[str, Any]
    buffers: dict[str, Any]

    def address(self, name: str, offset: int = 0) -> Any:
        """Return the address of a tensor's first element, or of the `offset`-th of its last axis."""
        buffer = self.buffers[name]
        return T.address_of(buffer[(*[0] * (len(buffer.shape) - 1), offset)])


def _entry(name: str, arguments: _Arguments, body: Callable[[_Entry], None]) -> Any:
    """Return an exported PrimFunc with checked arguments and the emitted body."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"tirx.noalias": True, "global_symbol": name, "tirx.is_scheduled": True})
            values = {
                argument: T.arg(argument, T.int64() if shape is None else T.handle())
                for argument, (_, shape) in arguments.items()
            }
            entry = _Entry(name, {}, {})
            for argument, (dtype, shape) in arguments.items():
                if shape is None:
                    entry.sizes[argument] = values[argument]
                    continue
                dimensions = [d if isinstance(d, int) else entry.sizes.setdefault(d, T.int64()) for d in shape]
                align = 4 if dtype == "int32" else -1  # callers' arrays have any alignment; -1 promises 64 bytes
                entry.buffers[argument] = T.match_buffer(values[argument], dimensions, dtype, align=align)
            body(entry)
        return builder.get()


def _pool_shape(layout: KVLayout) -> tuple[int | str, ...]:
    """Return the shape of the KV pool."""
    return ("num_pages", layout.page_items)  # number of items; layers are the outermost axis


def _state_slots(config: ModelConfig) -> _Arguments:
    """Return the slots at which each row of the page table reads and writes its state; empty if there are no states."""
    of_rows: tuple[int | str, ...] = ("num_sequences",)
    return {name: ("int32", of_rows) for name in ("state_in", "state_out") if config.state_bytes}


def _state_pool(config: ModelConfig) -> _Arguments:
    """Return the argument of the state pool; empty if there are no states."""
    shape: tuple[int | str, ...] = ("num_slots", config.state_bytes // STATE_ITEM_BYTES)
    return {"state_pool": ("float32", shape)} if config.state_bytes else {}


def _adapter_of_token(lora: LoraInfo | None) -> _Arguments:
    """Return the adapter of each token, -1 for none; empty if the module has no room for adapters."""
    return {} if lora is None else {"adapter_of_token": ("int32", ("num_tokens",))}


def _adapters(lora: LoraInfo | None) -> _Arguments:
    """Return the arguments with the ranks and the matrices of adapters; empty if there is no room for them."""
    if lora is None:
        return {}
    return {
        "adapter_ranks": ("int32", (lora.max_loras, lora.num_matrices)),
        "adapters": (storage_type(DTYPES[lora.dtype]), (lora.max_loras * lora.stride,)),
    }


def _forward(
    name: str,
    program: Program,
    plan: WeightPlan,
    config: ModelConfig,
    layout: KVLayout,
    max_num_tokens: int,
    symbols: Mapping[Any, str],
    lora: LoraInfo | None,
    *,
    is_scored: bool,
) -> Any:
    """Return `forward`, `forward_scored`, `draft` or `draft_frequent` for a program."""
    tokens: tuple[int | str, ...] = ("num_tokens",)
    arguments: _Arguments = {
        "token_ids": ("int32", tokens),
        "positions": ("int32", tokens),
        "slots": ("int32", tokens),
        "row_of_token": ("int32", tokens),
        "page_table": ("int32", ("num_sequences", "table_stride")),
        "kv_lengths": ("int32", tokens),
        "logit_rows": ("int32", ("num_logits",)),
        **_state_slots(config),
        **_adapter_of_token(lora),
        "kv_pool": (KV_DTYPES[layout.dtype], _pool_shape(layout)),
        **_state_pool(config),
        **_adapters(lora),
        "weights": ("uint8", (plan.num_bytes,)),
        "workspace": ("uint8", (program.workspace_bytes,)),
        "logits": ("float32", ("num_logits", round_up(config.num_outputs, ROW_BLOCK))),
    }
    if is_scored:
        arguments["mass"] = ("float32", (layout.num_layers, layout.num_kv_heads, "num_pages", PAGE_SIZE))
        arguments["counts"] = ("int32", ("num_pages", PAGE_SIZE))
        heads = (config.num_attention_heads, config.head_dim)
        arguments["queries"] = ("float32", (layout.num_layers, max_num_tokens, *heads))
        arguments["stride"] = ("int64", None)

    def body(entry: _Entry) -> None:
        sizes = dict(entry.sizes)
        weights, workspace = entry.buffers["weights"], entry.buffers["workspace"]
        _check_indices(entry, config.vocab_size, 0 if lora is None else lora.max_loras)

        def value(argument: Argument, is_pointer: bool) -> Any:
            if isinstance(argument, Input):
                return entry.address(argument.name, argument.offset)
            if isinstance(argument, Scratch):
                return T.address_of(workspace[argument.offset])
            if isinstance(argument, WeightTensor):
                return T.address_of(weights[plan.offset(argument.name)])
            if isinstance(argument, Size):
                return sizes[argument.name] * argument.times if argument.times > 1 else sizes[argument.name]
            # an unused pointer must still be valid
            return T.address_of(workspace[0]) if is_pointer else T.int64(argument)

        for call in program.calls:
            if call.is_scoring and not is_scored:
                continue
            parameters = program.kernels[call.key].params
            values = [
                value(argument, not _is_integer(parameter))
                for argument, parameter in zip(call.arguments, parameters, strict=True)
            ]
            _call(symbols[call.key], values)

    return _entry(name, arguments, body)


def _call(symbol: str, values: list[Any]) -> None:
    """Emit a call of a kernel, which is in another object."""
    T.evaluate(T.call_extern("int32", symbol, *values))


def _check_indices(entry: _Entry, vocab_size: int, max_loras: int) -> None:
    """Emit checks that raise if an index is out of range; their cost is not measurable."""
    num_tokens, num_pages = entry.sizes["num_tokens"], entry.sizes["num_pages"]
    visible = entry.sizes["table_stride"] * PAGE_SIZE
    ranges = [
        ("token_ids", 0, vocab_size),
        ("positions", 0, MAX_POSITION),
        ("slots", 0, num_pages * PAGE_SIZE),
        ("row_of_token", 0, entry.sizes["num_sequences"]),
        ("page_table", 0, num_pages),
        ("kv_lengths", 1, visible + 1),
        ("logit_rows", 0, num_tokens),
    ]
    if "num_slots" in entry.sizes:  # the first slot is zeros, and never written
        num_slots = entry.sizes["num_slots"]
        ranges += [("state_in", 0, num_slots), ("state_out", 1, num_slots)]
    if max_loras:
        ranges.append(("adapter_of_token", -1, max_loras))
    for name, low, high in ranges:
        buffer = entry.buffers[name]
        with T.grid(*buffer.shape) as indices:
            value = T.Cast("int64", buffer[tuple(indices) if len(buffer.shape) > 1 else indices])
            with T.Assert(tvm.tirx.And(value >= low, value < high), f"{name} holds an index outside its range"):
                pass


def _is_integer(parameter: Any) -> bool:
    """Return whether a parameter of a kernel is an int64."""
    return bool(tvm.ir.is_prim_expr(parameter)) and str(parameter.ty) == str(T.int64().ty)


def _top_logits(config: ModelConfig, symbol: str) -> Any:
    """Return the entry point of `top_k`."""
    stride = round_up(config.num_outputs, ROW_BLOCK)
    arguments: _Arguments = {
        "logits": ("float32", ("num_rows", stride)),
        "scratch": ("float32", ("num_rows", num_maxima(config.num_outputs))),
        "values": ("float32", ("num_rows", TOP_LOGITS)),
        "token_ids": ("int32", ("num_rows", TOP_LOGITS)),
        "is_finite": ("int32", ("num_rows",)),
        "vocab_size": ("int64", None),
    }

    def body(entry: _Entry) -> None:
        vocab_size, num_rows = entry.sizes["vocab_size"], entry.sizes["num_rows"]
        with T.Assert(tvm.tirx.And(vocab_size >= 1, vocab_size <= config.num_outputs), "vocab_size is out of range"):
            pass
        pointers = [entry.address(argument) for argument in entry.buffers]
        _call(symbol, [*pointers, T.int64(stride), vocab_size, num_rows])

    return _entry("top_logits", arguments, body)


def _weight_sums(config: ModelConfig, symbol: str) -> Any:
    """Return the entry point of `weight_sums`."""
    stride = round_up(config.num_outputs, ROW_BLOCK)
    arguments: _Arguments = {
        "logits": ("float32", ("num_rows", stride)),
        "values": ("float32", ("num_rows", TOP_LOGITS)),
        "scale": ("float64", (1,)),
        "sums": ("float64", (-(-config.num_outputs // WEIGHT_BLOCK),)),
        "row": ("int64", None),
        "vocab_size": ("int64", None),
    }

    def body(entry: _Entry) -> None:
        row, vocab_size = entry.sizes["row"], entry.sizes["vocab_size"]
        for name, value, low, high in (
            ("row", row, 0, entry.sizes["num_rows"] - 1),
            ("vocab_size", vocab_size, 1, config.num_outputs),
        ):
            with T.Assert(tvm.tirx.And(value >= low, value <= high), f"{name} is out of range"):
                pass
        pointers = [entry.address(argument) for argument in entry.buffers]
        _call(symbol, [*pointers, row, T.int64(stride), T.int64(TOP_LOGITS), vocab_size])

    return _entry("weight_sums", arguments, body)


def _limit_loop(name: str, symbol: str) -> Any:
    """Return the entry point of a loop that measures the machine."""
    size: _Arguments = {"memory": ("int32", ("count",))} if "memory" in name else {"count": ("int64", None)}

    def body(entry: _Entry) -> None:
        sizes = entry.sizes
        with T.Assert(tvm.tirx.And(sizes["parts"] >= 1, sizes["parts"] * LANES <= sizes["num_sums"]), "too many parts"):
            pass
        _call(symbol, [*map(entry.address, entry.buffers), sizes["count"], sizes["parts"]])

    return _entry(name, {**size, "sums": ("int32", ("num_sums",)), "parts": ("int64", None)}, body)


def _copy_pages(name: str, layout: KVLayout, symbol: str) -> Any:
    """Return the entry point that copies rows between pages."""
    copies: tuple[int | str, ...] = ("num_copies",)
    arguments: _Arguments = {
        "kv_pool": (KV_DTYPES[layout.dtype], _pool_shape(layout)),
        "source": ("int32", copies),
        "destination": ("int32", copies),
        "num_rows": ("int32", copies),
    }

    def body(entry: _Entry) -> None:
        pointers = [entry.address(argument) for argument in arguments]
        _call(symbol, [*pointers, entry.sizes["num_pages"], entry.sizes["num_copies"]])

    return _entry(name, arguments, body)


def _move_pages(name: str, layout: KVLayout, symbol: str) -> Any:
    """Return the entry point that copies pages out of the pool, or into it."""
    dtype = KV_DTYPES[layout.dtype]
    arguments: _Arguments = {
        "kv_pool": (dtype, _pool_shape(layout)),
        "pages": ("int32", ("num_moved",)),
        "buffer": (dtype, ("num_moved", layout.page_items)),
    }

    def body(entry: _Entry) -> None:
        pointers = [entry.address(argument) for argument in arguments]
        _call(symbol, [*pointers, entry.sizes["num_pages"], entry.sizes["num_moved"]])

    return _entry(name, arguments, body)
