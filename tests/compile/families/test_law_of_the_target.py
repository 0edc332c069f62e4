"""Law of the target: the same weights and token ids give the same bits of logits on all targets of a numeric class.

The digest is the one that `radixlm verify-bits` prints. Kernels are compared alone in `tests/compile/kernels`; here is
what the whole of a model makes of them, for each kind of layer and of KV.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile.codegen.targets import TARGETS, Target
from radixlm.runtime.artifact import MODULE, WEIGHTS, Artifact
from radixlm.runtime.artifact.manifest import KVDType
from radixlm.runtime.model.logits_digest import LogitsDigest, logits_digest

from ..kernels.harness import runnable
from .harness import COMPILED
from .test_law_of_the_row import PRECISIONS, kv_kinds

Case = tuple[str, str, KVDType]  # family, precision and KV kind
# Sinks and experts; states, with gates and norms of heads; latent attention; temperatures, which take logarithms.
SHORT: tuple[Case, ...] = (
    ("gpt_oss", "q8", "k12v8"),
    ("qwen3_5", "q4", "k12v8"),
    ("deepseek_v2", "q8", "f16"),
    ("llama4", "q4", "f32"),
)
FUSED = [target for target in runnable() if target.has_fma]
NOT_FUSED = [target for target in runnable() if not target.has_fma]
LIBM, LIBC = ctypes.CDLL("libm.so.6"), ctypes.CDLL("libc.so.6")


def cases() -> list[Any]:
    """Each family once, with precisions and KV kinds in turns."""
    every = [
        (name, PRECISIONS[place % len(PRECISIONS)], (kinds := kv_kinds(name))[place // 3 % len(kinds)])
        for place, name in enumerate(COMPILED)
    ]
    marked = [(case, []) for case in SHORT] + [(case, [pytest.mark.long]) for case in every if case not in SHORT]
    return [pytest.param(case, id="-".join(case), marks=marks) for case, marks in marked]


@pytest.mark.skipif(len(FUSED) < 2, reason="this CPU runs fewer than two targets with fused multiply-add")
@pytest.mark.parametrize("case", cases())
def test_targets_with_fused_multiply_add_have_the_same_bits(case: Case, family_artifact: Callable[..., Path]) -> None:
    found = digests(family_artifact, case, FUSED)
    assert {each.numeric_class for each in found.values()} == {"fma"}
    assert len({each.weights for each in found.values()}) == 1
    assert len({each.sha256 for each in found.values()}) == 1, found


def test_targets_without_it_are_a_class_of_their_own(family_artifact: Callable[..., Path]) -> None:
    case: Case = ("qwen3_5", "q4", "f16")
    found = digests(family_artifact, case, [*NOT_FUSED, *FUSED[:1]])
    by_class: dict[str, set[str]] = {}
    for each in found.values():
        by_class.setdefault(each.numeric_class, set()).add(each.sha256)
    assert {name: len(bits) for name, bits in by_class.items()} == dict.fromkeys(by_class, 1)
    assert len(set.union(*by_class.values())) == len(by_class), "one class has the bits of the other"


def test_a_model_with_other_weights_has_another_digest(family_artifact: Callable[..., Path]) -> None:
    one, other = (digests(family_artifact, (name, "q4", "f16"), FUSED[:1]) for name in ("qwen3_5", "llama4"))
    assert one.keys() == other.keys() and one != other


def digests(family_artifact: Callable[..., Path], case: Case, targets: list[Target]) -> dict[str, LogitsDigest]:
    """By target; none of the modules calls a function of libm."""
    found = {}
    for target in targets:
        artifact = Artifact.open(family_artifact(*case, target.name))
        assert artifact.manifest.files[WEIGHTS].size > 0
        [table] = re.findall(rb"\0libc\.so\.6\0((?:\w+\0)+)", (artifact.path / MODULE).read_bytes())
        names = table.decode().split("\0")
        assert "memset" in names, "imports are among these"
        assert [name for name in names if is_of_libm(name)] == []
        found[target.name] = logits_digest(artifact, num_threads=1)
    return found


def is_of_libm(name: str) -> bool:
    """Whether libm has this function, and libc has not."""
    return hasattr(LIBM, name) and not hasattr(LIBC, name)


def test_a_call_of_libm_would_be_seen() -> None:
    assert is_of_libm("sinf") and not is_of_libm("memcpy") and not is_of_libm("kernel_0")
    assert set(TARGETS) >= {target.name for target in runnable()}
