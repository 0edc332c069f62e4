"""The closing summary names the targets that were executed, and those that were not."""

from __future__ import annotations

import doctest

from . import slowest_files, target_report
from .target_report import target_lines

TARGETS = {"x86-64-v4-vnni": ("avx2", "avx512f"), "x86-64-v3": ("avx2",), "x86-64": ()}


def test_examples_are_true() -> None:
    assert doctest.testmod(target_report).failed == 0
    assert doctest.testmod(slowest_files).failed == 0


def test_a_machine_without_avx_512_names_what_it_did_not_execute() -> None:
    executed = ["a.py::test_x[x86-64]", "a.py::test_x[kind=q4-target=x86-64-v3]", "a.py::test_y[x86-64]"]
    executed.append("a.py::test_the_name_is_known[x86-64-v4-vnni]")
    skipped = ["a.py::test_x[x86-64-v4-vnni]", "a.py::test_y[x86-64-v4-vnni]"]
    assert target_lines(executed, skipped, TARGETS, {"avx2"}) == [
        "executed: x86-64-v3 (1 tests), x86-64 (2 tests)",
        "NOT executed: x86-64-v4-vnni (2 tests skipped): this CPU lacks avx512f; "
        "no emulator that Debian or PyPI has for programs runs it",
    ]


def test_a_target_whose_tests_were_all_skipped_is_named_though_the_machine_has_it() -> None:
    lines = target_lines(["a.py::test_x[x86-64]"], ["a.py::test_x[x86-64-v3]"], TARGETS, {"avx2"})
    assert lines[1:] == ["NOT executed: x86-64-v3 (1 tests skipped): all its tests were skipped"]


def test_a_run_without_targets_says_nothing_of_them() -> None:
    assert target_lines(["a.py::test_x", "a.py::test_y[3]"], ["b.py::test_z"], TARGETS, set()) == []
