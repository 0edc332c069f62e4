"""`import radixlm` has what a user needs, loads it when it is used, and is the command line as a module."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pytest
import radixlm
from radixlm import runtime
from radixlm.runtime.version import VERSION


def output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_package_exports_what_the_runtime_does() -> None:
    assert {*radixlm.__all__} == {*runtime.__all__, "__version__"}
    assert {*radixlm.__all__} <= {*dir(radixlm)}
    for name in runtime.__all__:
        assert getattr(radixlm, name) is getattr(runtime, name)
    assert radixlm.__version__ == VERSION


def test_errors_are_those_that_are_raised() -> None:
    from radixlm.runtime import errors

    exported = [getattr(radixlm, name) for name in radixlm.__all__ if isinstance(getattr(radixlm, name), type)]
    raised = [each for each in exported if issubclass(each, radixlm.RadixLMError)]
    assert radixlm.InvalidParameter in raised
    assert all(getattr(errors, each.__name__) is each for each in raised)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'radixlm' has no attribute 'Enigne'"):
        radixlm.Enigne  # noqa: B018
    with pytest.raises(ImportError, match="Enigne"):
        from radixlm import Enigne  # noqa: F401


def test_importing_it_loads_nothing_that_is_not_used() -> None:
    code = "import sys, radixlm; radixlm.RadixLMError; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    assert not {*output("-c", code).split()} & {"numpy", "tvm", "tvm_ffi", "tokenizers", "click"}


def test_help_says_what_to_do_first() -> None:
    told = pydoc.plain(pydoc.render_doc(radixlm))
    assert "with Engine(" in told and "python -m radixlm" in told


def test_the_module_is_the_command_line() -> None:
    assert output("-m", "radixlm", "--version") == f"radixlm, version {VERSION}\n"
