"""Every module of bench/ is reached from a command that the Makefile or a documentation page names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
NAMED_IN = ("Makefile", "README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
MAX_LINES, MAX_MODULES = 300, 20  # of a file, of a folder


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__").removesuffix(".__init__")


MODULES = {module(path): path for path in BENCH.rglob("*.py") if path.name != "__init__.py"}


def commands() -> set[str]:
    """Modules that pages name as `-m bench.X`, also where a line breaks."""
    return {
        name for page in NAMED_IN for name in re.findall(r"-m\s+(bench(?:\.\w+)+)", (ROOT / page).read_text("utf-8"))
    }


def used_by(name: str) -> set[str]:
    """Modules of bench/ that one imports, or starts in processes of their own."""
    path = MODULES[name]
    package = ["bench", *path.relative_to(BENCH).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & MODULES.keys()


def test_named_commands_are_there() -> None:
    assert commands() <= MODULES.keys()


def test_every_module_is_reached_from_a_named_command() -> None:
    reached, waiting = set[str](), list(commands())
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += used_by(name)
    assert MODULES.keys() - reached == set()


def test_every_result_is_rendered() -> None:
    from bench.report.page import SECTIONS

    assert {path.stem for path in (BENCH / "results").glob("*.json")} <= SECTIONS.keys()


def test_files_and_folders_are_of_a_size_to_read() -> None:
    assert [path for path in MODULES.values() if len(path.read_text("utf-8").splitlines()) > MAX_LINES] == []
    folders = [BENCH, *(path for path in BENCH.iterdir() if path.is_dir())]
    assert [folder for folder in folders if len(list(folder.glob("*.py"))) > MAX_MODULES] == []
