"""The design's one-way rules, read from the imports themselves.

cli -> {compile, runtime}; compile -> {a few files of runtime, tokenizer_fix}; runtime -> tokenizer_fix; and
inside runtime, server -> engine -> cache. Only compile/ imports tvm, only model_runner imports tvm_ffi.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "compile", "runtime", "tokenizer_fix")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

ALLOWED_FOLDERS = {
    "cli": {"compile", "runtime"},
    "compile": {"runtime", "tokenizer_fix"},
    "runtime": {"tokenizer_fix"},
    "tokenizer_fix": set(),
}
# What the compiler shares with the runtime: the artifact, the runner that its last stage tries it with, and how a
# chat template is parsed.
RUNTIME_FOR_COMPILE = {"artifact", "batch", "chat_template", "cpu", "errors", "manifest", "model_runner"}
# What may not know of what, inside runtime.
CACHE = {
    *("page_pool", "sequence", "kv_transaction", "prefix_match"),
    *("radix_node", "node_table", "found_run", "radix_tree", "prefix_cache", "eviction_queue"),
    *("text_walk", "spelled_children", "reply_alias", "why_not_more", "cache_namespace", "cache_tree", "cache_uses"),
    *("disk_tier", "disk_index", "disk_reader", "disk_writer", "page_loader", "page_saver", "load_planner"),
    *("loaded_prefix", "tier_stats", "end_loader", "page_inserter", "load_counts"),
}
ENGINE = {
    "admission",
    "prompts",
    "engine",
    "engine_parts",
    "request_intake",
    "engine_stats",
    "request_output",
    "step_plan",
    "kv_budget",
    "engine_core",
    "disk_turns",
    "request_ends",
    "prefill_measure",
    "stored_prefill",
    "idle_work",
    "engine_loop",
    "generation_stream",
    "request",
    "scheduler",
    "sampler",
}
GRAMMAR = {
    "tool_format",
    "tool_messages",
    "grammar",
    "grammars",
    "grammar_constraint",
    "grammar_trial",
    "grammar_vocabulary",
    "token_constraint",
}
FORBIDDEN_IN_RUNTIME = {
    **{module: {*ENGINE, "server", "model_runner", "artifact"} for module in CACHE},
    **{module: {"server"} for module in ENGINE},
    **{module: {*ENGINE, *CACHE, "server"} for module in ("artifact", "manifest", "model_runner", "batch", "cpu")},
    "scheduler": {"server", "engine", "engine_core", "model_runner", "sampler", "artifact"},
    "chat_template": {*ENGINE, *CACHE, "server", "model_runner", "artifact"},
    **{module: {*ENGINE, *CACHE, "server", "model_runner"} for module in GRAMMAR},
    "store": {*ENGINE, *CACHE, "server", "model_runner", "artifact", "batch"},
    "errors": {*ENGINE, *CACHE, "server", "model_runner", "artifact", "manifest"},
}


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that `path` imports at run time, `if TYPE_CHECKING` left out."""
    package = ["radixlm", *path.relative_to(ROOT).parent.parts]
    for node in _run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from _run_time_nodes(child)


def ours(path: Path) -> Iterator[list[str]]:
    """The imports of `path` that are radixlm's own, as parts after `radixlm`: ["runtime", "errors"]."""
    for name in imports(path):
        if name.startswith("radixlm."):
            yield name.split(".")[1:]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    assert {parts[0] for parts in ours(path)} <= ALLOWED_FOLDERS[folder] | {folder}


@pytest.mark.parametrize("path", [p for p in MODULES if ROOT / "compile" in p.parents], ids=_name)
def test_the_compiler_knows_only_the_artifact_and_its_runner(path: Path) -> None:
    used = {parts[1] for parts in ours(path) if parts[0] == "runtime" and len(parts) > 1}
    assert used <= RUNTIME_FOR_COMPILE


@pytest.mark.parametrize("path", [p for p in MODULES if ROOT / "runtime" in p.parents], ids=_name)
def test_inside_the_runtime_imports_point_one_way(path: Path) -> None:
    module = path.relative_to(ROOT / "runtime").parts[0].removesuffix(".py")
    used = {parts[1] for parts in ours(path) if parts[0] == "runtime" and len(parts) > 1}
    assert not used & FORBIDDEN_IN_RUNTIME.get(module, set())


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_the_compiler_imports_tvm_and_only_the_model_runner_tvm_ffi(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)}
    if ROOT / "compile" not in path.parents:
        assert "tvm" not in used
    if path != ROOT / "runtime" / "model_runner.py":
        assert "tvm_ffi" not in used


@pytest.mark.parametrize("path", [p for p in MODULES if ROOT / "compile" not in p.parents], ids=_name)
def test_across_folders_imports_are_absolute_and_inside_one_relative(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    depth = len(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= depth
            assert not (node.module or "").startswith(f"radixlm.{folder}.")


def test_every_folder_of_modules_is_a_listed_package_and_no_other_is() -> None:
    listed = set(_pyproject()["tool"]["setuptools"]["packages"])
    on_disk = {".".join(["radixlm", *path.relative_to(ROOT).parent.parts]) for path in MODULES}
    assert listed == on_disk


def test_every_top_folder_is_mapped_typed_and_linked_for_type_checkers() -> None:
    assert _pyproject()["tool"]["setuptools"]["package-dir"] == {f"radixlm.{f}": f for f in FOLDERS}
    for folder in FOLDERS:
        assert (ROOT / folder / "py.typed").is_file()
        assert (ROOT / ".types" / "radixlm" / folder).resolve() == ROOT / folder
    assert {path.name for path in (ROOT / ".types" / "radixlm").iterdir()} == set(FOLDERS)


def test_radixlm_is_a_namespace_package() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / ".types" / "radixlm" / "__init__.py").exists()


def test_every_module_says_what_it_knows() -> None:
    silent = [_name(p) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert silent == []


def _pyproject() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# The rules are only as good as the reader of imports: it is held to a small file of its own.


def test_the_reader_of_imports_sees_every_form_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "runtime" / "server" / "x.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "def h():\n    import i\nif TYPE_CHECKING:\n    import never\nelse:\n    pass\n"
    )
    assert set(imports(module)) == {
        *("a.b", "c", "c.d", "radixlm.runtime.server", "radixlm.runtime.server.e"),
        *("radixlm.runtime.f", "radixlm.runtime.f.g", "i"),
    }
