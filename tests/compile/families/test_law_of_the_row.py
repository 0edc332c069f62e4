"""Law of the row, for every family, KV kind and target: a token has the same bits in steps of any number of rows.

A step of one row and a step of two hundred run different code of the same kernels. The full product would compile a
thousand artifacts; here every family meets every KV kind, every precision and every target that this machine can run,
and every KV kind and precision every target. What is not marked long has the artifacts of other tests, and one for each
target that `make test` runs kernels on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import TARGETS, find_target
from radixlm.compile.families.registry import model_config
from radixlm.compile.kv_layout import why_no_codes
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import KVDType
from radixlm.runtime.model.model_runner import ModelRunner

from ...goldens.families import FAMILIES
from ..kernels.harness import TARGETS_HERE, often_run, runs_here
from ..ragged import Rows
from .harness import COMPILED, OFTEN

NUM_PAGES, NUM_SLOTS = 211, 64  # pages are a prime number, so that Rows can scatter them
ROW_COUNTS = (2, 5, 8, 10, 16, 31, 64, 200)
NUM_TOKENS = 200
KV_KINDS: tuple[KVDType, ...] = ("f16", "f32", "k12v8")
PRECISIONS = ("f32", "q8", "q4")
OTHER_PRECISIONS = {"qwen3": 1, "qwen3_moe": 2}  # than the others have on a target
HERE = [target.name for target in TARGETS_HERE]
NATIVE = find_target("native").name
Case = tuple[str, str, KVDType, str]  # family, precision, KV kind and target
# The sinks of gpt-oss, of two sizes of registers and in codes, where a product was once fused into a sum in one copy of
# an expression alone; then other features of attention, experts and states, one for each target.
FOR_EACH_TARGET: tuple[Case, ...] = (
    ("gpt_oss", "q8", "k12v8", "x86-64-v3"),
    ("gpt_oss", "q8", "k12v8", "x86-64-v4-vnni"),
    ("gemma2", "q4", "k12v8", "x86-64-v4"),
    ("qwen3_5", "q8", "f32", "x86-64-v3-vnni"),
    ("granitemoe", "q4", "f32", "x86-64-v2"),
    ("deepseek_v2", "f32", "f16", "x86-64"),
)


def kv_kinds(name: str) -> tuple[KVDType, ...]:
    """Those that a family's keys and values can be kept in."""
    config = model_config(huggingface_settings(name, FAMILIES[name].config))
    return KV_KINDS if why_no_codes(config) is None else KV_KINDS[:2]


def pairs() -> Iterator[Case]:
    """Every pair of a family, a KV kind, a precision and a target, but of a target and a precision few families.

    Families that have a target and a precision in common share most of their kernels, and compiling these is what takes
    the time.
    """
    for place, name in enumerate(COMPILED):
        kinds = kv_kinds(name)
        for number, target in enumerate(HERE):
            precision = PRECISIONS[(number // 2 + OTHER_PRECISIONS.get(name, 0)) % len(PRECISIONS)]
            yield name, precision, kinds[(place + number) % len(kinds)], target


def cases() -> list[Any]:
    often = [(name, "f32", KV_KINDS[0], NATIVE) for name in OFTEN if name in COMPILED]
    short = [*often, *(case for case in FOR_EACH_TARGET if case[3] in often_run())]
    long = [case for case in dict.fromkeys([*FOR_EACH_TARGET, *pairs()]) if case not in short]
    marked = [(case, []) for case in short] + [(case, [pytest.mark.long]) for case in long]
    return [pytest.param(case, id="-".join(case), marks=marks) for case, marks in marked if runs_here(TARGETS[case[3]])]


def test_every_family_meets_every_kv_kind_precision_and_target() -> None:
    found = set(pairs())
    assert {(name, kv) for name, _, kv, _ in found} == {(name, kv) for name in COMPILED for kv in kv_kinds(name)}
    assert {(name, target) for name, _, _, target in found} == set(product(COMPILED, HERE))
    assert {(kv, target) for _, _, kv, target in found} == set(product(KV_KINDS, HERE))
    assert {(name, precision) for name, precision, _, _ in found} == set(product(COMPILED, PRECISIONS))
    assert {(precision, target) for _, precision, _, target in found} == set(product(PRECISIONS, HERE))
    assert {target for _, _, _, target in FOR_EACH_TARGET} == set(HERE)


@pytest.mark.parametrize("case", cases())
def test_a_token_has_the_same_bits_in_steps_of_any_number_of_rows(
    case: Case, family_artifact: Callable[..., Path]
) -> None:
    name, precision, kv_dtype, target = case
    artifact = Artifact.open(family_artifact(name, precision, kv_dtype, target))
    runner = ModelRunner(artifact, num_pages=NUM_PAGES, num_state_slots=NUM_SLOTS, num_threads=1)
    rows = Rows(runner, NUM_PAGES, artifact.manifest.module.max_num_logits)
    context = FAMILIES[name].context_length or NUM_TOKENS
    ids = np.random.default_rng(0).integers(3, artifact.manifest.model.vocab_size, min(NUM_TOKENS, context)).tolist()
    alone = in_steps(rows, ids, 1)
    for count in ROW_COUNTS:
        differ = (in_steps(rows, ids, count) != alone).any(axis=1)
        assert not differ.any(), f"{differ.sum()} of {len(ids)} tokens have other bits in steps of {count}"
    runner.close()


def in_steps(rows: Rows, ids: list[int], count: int) -> np.ndarray:
    """The logits of all tokens, so many of them in a step."""
    number = rows.add(ids)
    parts = [rows.step({number: min(count, len(ids) - start)})[number] for start in range(0, len(ids), count)]
    return np.concatenate(parts)
