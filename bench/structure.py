"""Count what makes the code hard to understand: `make trace`, or `python -m bench.structure [--list]`.

Files and lines, the longest chain of imports, modules that only one other imports, and methods that only forward to a
member. Figures to compare before and after a change; they are no limits. Reads the sources, and imports none of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import click

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "compile", "runtime", "tokenizer_fix")
SLIVER = 80  # lines: a module below this that only one other imports could be part of that one

Graph = dict[str, set[str]]
"""Modules of ours, "runtime.cache.page_pool", by the module that imports them."""


def name_of(path: Path, root: Path) -> str:
    """Return the module of a file, without `radixlm.`; a package is its `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path) -> dict[str, Path]:
    """Return the product's files by module."""
    return {name_of(path, root): path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}


def imports(files: dict[str, Path], *, all_of_them: bool) -> Graph:
    """Return the modules that each module imports, when it is loaded or, with `all_of_them`, ever."""
    graph: Graph = {}
    for name, path in files.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        body = ast.parse(path.read_text(encoding="utf-8"))
        nodes = ast.walk(body) if all_of_them else _loaded(body.body)
        graph[name] = {found for node in nodes for found in _targets(node, package) if found in files} - {name}
    return graph


def _loaded(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is loaded, except those that only type checkers read."""
    for node in body:
        if isinstance(node, ast.If):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield from _loaded(node.body)
            yield from _loaded(node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from _loaded(node.body)
        else:
            yield node


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules, and names in them, that an import statement may import, without `radixlm.`."""
    if isinstance(node, ast.Import):
        yield from (alias.name.removeprefix("radixlm.") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])]).removeprefix("radixlm.")
        for alias in node.names:
            yield from (f"{base}.{alias.name}", base)


def longest_chain(graph: Graph) -> tuple[str, ...]:
    """Return the longest chain of modules in which each imports the next."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(other) for other in sorted(graph[name])), key=len, default=()))

    return max((below(name) for name in sorted(graph)), key=len, default=())


def only_importers(graph: Graph) -> dict[str, str]:
    """Return the modules that only one other imports, with that one."""
    importers: dict[str, list[str]] = {}
    for name, found in graph.items():
        for other in found:
            importers.setdefault(other, []).append(name)
    return {name: found[0] for name, found in sorted(importers.items()) if len(found) == 1}


def forwarding(files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield methods whose only statement reads an attribute of a member or calls a method of one: module and name."""
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield from ((module, f"{node.name}.{method.name}") for method in filter(_forwards, node.body))


def _forwards(method: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return whether a method only calls one method of an attribute, or returns one: `return self.a.b()`."""
    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = method.body[1:] if ast.get_docstring(method) else method.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    read = body[0].value
    read = read.value if isinstance(read, ast.Await) else read
    read = read.func if isinstance(read, ast.Call) else read
    return isinstance(read, ast.Attribute) and bool(re.fullmatch(r"self\.\w+", ast.unparse(read.value)))


@click.command()
@click.option("--list", "is_listed", is_flag=True, help="List them, too.")
@click.option("--root", type=click.Path(exists=True, path_type=Path), default=ROOT, help="Another checkout.")
def main(is_listed: bool, root: Path) -> None:
    """Print the counts of the product's sources."""
    files = sources(root)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    core = [count for name, count in lines.items() if not name.startswith("runtime.extras")]
    chain = longest_chain(imports(files, all_of_them=False))
    alone = only_importers(imports(files, all_of_them=True))
    slivers = [name for name in alone if lines[name] < SLIVER]
    forwards = list(forwarding(files))
    if is_listed:
        print("\n".join(["the longest chain:", *(f"  {name}" for name in chain)]))
        print("\n".join(f"  {lines[name]:4} {name} <- {alone[name]}" for name in alone))
        print("\n".join(f"  {module}: {name}" for module, name in forwards))
    print(f"{len(files)} files of {sum(lines.values()):,} lines; without extras {len(core)} of {sum(core):,}")
    print(f"longest chain of imports {len(chain)}; methods that only forward {len(forwards)}")
    print(f"modules with one importer {len(alone)}, of them below {SLIVER} lines {len(slivers)}")


if __name__ == "__main__":
    main()
