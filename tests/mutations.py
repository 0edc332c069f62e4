"""Plant faults in copies of the product, one at a time, and see that the tests notice each.

    python -m tests.mutations              # the tests of this checkout
    python -m tests.mutations --tests REV  # those of a commit, of the same product

Prints which test failed first. The exit status is 1 if a fault went unnoticed. Each fault is a line that is changed. A
line that is no longer in the product is an error, and so are tests that cannot be collected.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A failure that Hypothesis makes smaller is the same failure, and each try may build a kernel.
NO_SHRINKING = """\
from hypothesis import Phase, settings

settings.register_profile("planted", phases=[Phase.explicit, Phase.generate])
settings.load_profile("planted")
"""
PRODUCT = (
    *("cli", "compile", "package", "runtime", "tokenizer_fix", ".types", "bench", "examples", "pyproject.toml"),
    "Makefile",
)


@dataclass(frozen=True)
class Fault:
    """A line of the product that is changed, and the tests that should notice.

    `select` is pytest's `-k`, where the first tests of a file are not those.
    """

    name: str
    path: str
    before: str
    after: str
    tests: str
    select: str = ""


FAULTS = (
    Fault(
        "wide activations: the high byte is rounded down",
        *("compile/kernels/activation.py", "rounded + splat(T.int32(128))", "rounded + splat(T.int32(127))"),
        "tests/compile/kernels/test_activation.py",
        select="codes and wide",
    ),
    Fault(
        "integer matrices: the second half of a group of 32 takes the first half's scale",
        *("compile/kernels/integer_tile.py", "return g * 2 + half", "return g * 2"),
        "tests/compile/kernels/test_integer_linear.py",
        select="q8_g16 and not sizes",
    ),
    Fault(
        "integer matrices: the last row of a slab is left out",
        "compile/kernels/linear.py",
        "return self.first + m < self.stop",
        "return self.first + m < T.max(self.stop - self.stop // 131, 1)",
        "tests/compile/kernels/test_integer_linear.py",
        select="q8_g32 and (alone or every_batch)",
    ),
    Fault(
        "K-quants: minima are multiplied with the super-group's scale of scales",
        *("compile/kernels/integer_tile.py", "matrix.scales.super_minimum(block", "matrix.scales.super_scale(block"),
        "tests/compile/kernels/test_integer_linear.py",
        select="q4_g32_min_nested and not sizes",
    ),
    Fault(
        "matrices: the factor does not multiply the bias",
        "compile/kernels/linear.py",
        "value = value + bias[lanes(stored_block * ROW_BLOCK)]",
        "value = value + bias[lanes(stored_block * ROW_BLOCK)] * const(1 / spec.factor)",
        "tests/compile/kernels/test_float_linear.py",
    ),
    Fault(
        "attention: a window is one row too short",
        *("compile/kernels/attention_units.py", "T.int32(min(window, _MOST_ROWS))", "T.int32(min(window, 200) - 1)"),
        "tests/compile/kernels/test_attention_features.py",
    ),
    Fault(
        "attention: weights are powers of the score, without the row's maximum",
        "compile/kernels/attention_steps.py",
        "weights = exp2(score(r, p) - splat(maxima[r - rows.start]), self.has_fma)",
        "weights = exp2(score(r, p), self.has_fma)",
        "tests/compile/kernels/test_attention.py",
    ),
    Fault(
        "attention: a row's maximum is 0 at least",
        *("compile/kernels/attention_rows.py", "memory[lanes(state.maxima(micro))] = const(LOWEST)"),
        "memory[lanes(state.maxima(micro))] = const(0)",
        "tests/compile/kernels/test_attention.py",
    ),
    Fault(
        "RoPE: the second half is turned the other way",
        *("compile/kernels/rope.py", "second * cos + first * sin", "second * cos - first * sin"),
        "tests/compile/kernels/test_rope.py",
    ),
    Fault(
        "pages: values of one row too few are copied",
        "compile/kernels/kv_pool.py",
        "with serial(tokens * layout.value_dim) as j:",
        "with serial((tokens - 1) * layout.value_dim) as j:",
        "tests/compile/kernels/test_pages.py",
    ),
    Fault(
        "top-k: of equal logits the higher id comes first",
        *("compile/kernels/sampling/top_k.py", "_start + i)] >= splat(value)))", "_start + i)] > splat(value)))"),
        "tests/compile/kernels/test_top_k.py",
    ),
    Fault(
        "weight sums: the last block has weights of the padding",
        "compile/kernels/sampling/weight_sums.py",
        "with serial(vocab_size - start) as i:",
        "with serial(vocab_size - start + 1) as i:",
        "tests/compile/kernels/test_weight_sums.py",
    ),
    Fault(
        "sampler: a draw beside the end of a block's weight is not made again",
        "runtime/engine/step/draws.py",
        "index == len(inside) or min(wanted - start, inside[index] - wanted) <= nearest",
        "index == len(inside)",
        "tests/runtime/engine/test_sampler.py",
    ),
    Fault(
        "tool calls: a cut within the first tag releases a character too many",
        *(
            "runtime/chat/tools/tool_calls.py",
            "- overlap(self._held[start:], trigger) for",
            "- overlap(self._held[start:], trigger) // 2 for",
        ),
        "tests/runtime/chat/tools/test_tool_format.py",
    ),
    Fault(
        "stop strings: what may become one is held back a character too late",
        "runtime/chat/text_rules/text_search.py",
        "return self._num_read - self._trie.depths[self._node]",
        "return self._num_read - max(0, self._trie.depths[self._node] - 1)",
        "tests/runtime/chat/text_rules/test_stop_strings.py",
    ),
    Fault(
        "eviction: a page that one sequence reads is evicted",
        *(
            "runtime/cache/eviction.py",
            "lambda num_users: num_users == 0, users",
            "lambda num_users: num_users <= 1, users",
        ),
        "tests/runtime/cache/test_prefix_cache_random.py",
    ),
    Fault(
        "layout: the runtime imports the compiler's tvm",
        *("runtime/errors.py", "from typing import Self\n", "from typing import Self\n\nimport tvm\n"),
        "tests/test_layout.py",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", metavar="REV", help="take the tests of a commit")
    parser.add_argument("--only", default="", help="plant the faults whose name contains this")
    options = parser.parse_args()
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        _copy_product(copy)
        _copy_tests(copy, options.tests)
        (copy / "conftest.py").write_text(NO_SHRINKING, encoding="utf-8")
        for fault in FAULTS:
            if options.only in fault.name:
                start = time.monotonic()
                noticed_by = _plant(fault, copy)
                unnoticed += noticed_by is None
                print(f"{fault.name}\n    {noticed_by or 'NOT NOTICED'} ({time.monotonic() - start:.0f} s)", flush=True)
    return min(unnoticed, 1)


def _copy_product(copy: Path) -> None:
    for part in PRODUCT:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    for lock in ROOT.glob("requirements*.lock"):
        shutil.copy(lock, copy)


def _copy_tests(copy: Path, revision: str | None) -> None:
    if revision is None:
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        return
    archive = subprocess.run(["git", "archive", revision, "tests"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", copy], input=archive.stdout, check=True)


def _plant(fault: Fault, copy: Path) -> str | None:
    """The first test that fails with the fault; None if all pass."""
    path = copy / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.before) < 1:
        raise SystemExit(f"{fault.path} has no {fault.before!r} any more: change the fault {fault.name!r}")
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    try:
        data = os.environ.get("RADIXLM_DATA", str(ROOT.parent / "shared" / "data"))
        environment = os.environ | {"PYTHONPATH": str(copy / ".types"), "RADIXLM_DATA": data}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-x",
            "-p",
            "no:cacheprovider",
            "-r",
            "fE",
            "-k",
            fault.select,
            fault.tests,
        ]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED (\S+?::\w+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise SystemExit(f"{fault.name}: the tests did not run\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main())
