"""docs/architecture.md is true of the checkout: its paths exist, its folders are those of the code, in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_layout import COMPILE_ORDER, RUNTIME_ORDER

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOP = ("runtime", "compile", "tokenizer_fix", "cli", "tests")
PATHS = sorted(set(re.findall(rf"`((?:{'|'.join(TOP)})/[^`]*)`", TEXT)))
IN_RUNTIME = sorted(set(re.findall(r"\b((?:engine|cache|prefix|model|server)/[\w/.]*)", TEXT)))


def test_the_page_names_paths() -> None:
    assert len(PATHS) > 20 and len(IN_RUNTIME) > 5


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", IN_RUNTIME)
def test_every_path_in_the_way_of_a_request_exists(path: str) -> None:
    places = [ROOT / "runtime" / path, ROOT / "runtime" / f"{path}.py", ROOT / path]
    assert any(place.exists() for place in places)


@pytest.mark.parametrize(("folder", "order"), [("runtime", RUNTIME_ORDER), ("compile", COMPILE_ORDER)])
def test_the_folders_are_listed_in_the_order_of_their_imports(folder: str, order: tuple[str, ...]) -> None:
    table = TEXT.partition(f"| `{folder}/` |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)(?:\.py)?` \|", table, re.MULTILINE)
    assert tuple(listed) == order


def test_the_page_is_short() -> None:
    assert len(TEXT.splitlines()) <= 135
