"""An option of an extra that is not there is refused by name, and the core never imports what it works without."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.runtime import optional
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.errors import ExtraNotInstalled, InvalidParameter

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "no_such_extra"


@pytest.fixture(autouse=True)
def forget_what_was_found() -> Iterator[None]:
    find = optional.find
    find.cache_clear()
    yield
    find.cache_clear()


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in optional.OPTIONS:
        monkeypatch.setitem(optional.OPTIONS, name, ABSENT)


@pytest.mark.usefixtures("removed")
def test_an_option_of_an_extra_that_was_removed_is_refused_by_its_name() -> None:
    for name, value in {"kv_budget": 0.5, "chunk_cache_bytes": 5}.items():
        with pytest.raises(
            ExtraNotInstalled, match=f"{name} needs the extra '{ABSENT}', which is not installed"
        ) as told:
            EngineOptions(**{name: value})  # type: ignore[arg-type]
        assert told.value.param == name
    with pytest.raises(ExtraNotInstalled, match="kv_budget needs the extra"):
        RequestOptions(kv_budget=0.5)


@pytest.mark.usefixtures("removed")
def test_without_its_options_an_extra_that_was_removed_is_missed_by_nobody() -> None:
    options = EngineOptions()
    assert options.extra is None and optional.installed() == [] and optional.record_kinds() == {}
    assert EngineOptions().decide(RequestOptions(cache_match="off"), model=None).cache_match == "off"  # type: ignore[arg-type]


def test_an_extra_that_lacks_a_module_of_another_package_is_broken_and_not_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cachetools'", name="cachetools")

    monkeypatch.setattr(optional.importlib, "import_module", import_module)  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match="cachetools"):
        optional.find(optional.APPROXIMATE)


def test_a_not_installed_extra_is_the_callers_mistake() -> None:
    assert issubclass(ExtraNotInstalled, InvalidParameter)


def test_a_command_of_an_extra_that_was_removed_says_so_before_it_looks_at_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optional, "find", lambda name: None)
    result = CliRunner().invoke(cli, ["calibrate", "no-such-model.radixlm"])
    assert result.exit_code == 2 and "calibrate needs the extra 'approximate', which is not installed" in result.output


def test_an_engine_without_options_of_extras_imports_none() -> None:
    code = (
        "import sys; import radixlm.runtime.engine.opening; import radixlm.runtime.server\n"
        "from radixlm.runtime.engine.engine_options import EngineOptions\n"
        "EngineOptions(store='x')\n"
        "print([name for name in sys.modules if name.startswith('radixlm.runtime.extras')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_only_one_module_of_the_runtime_names_the_folder_of_extras() -> None:
    naming = {
        str(path.relative_to(ROOT))
        for folder in ("runtime", "cli", "compile", "tokenizer_fix")
        for path in (ROOT / folder).rglob("*.py")
        if "extras" not in path.relative_to(ROOT).parts and re.search(r"runtime\.extras", path.read_text("utf-8"))
    }
    assert naming == {"runtime/optional.py", "cli/calibrate.py", "cli/inspect.py"}
