"""The design's one-way rules, read from the imports themselves.

package -> {cli, runtime}; cli -> {compile, runtime}; compile -> {a few modules of runtime, tokenizer_fix}; runtime ->
tokenizer_fix; and inside runtime and compile, the folders in order. What only type checkers read counts, too, and what
an import imports. Only compile/ imports tvm, only runtime/model/library.py tvm_ffi. Tests read all modules and name
each that breaks its rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "package"  # the folder of `radixlm` itself; the others are its subpackages
FOLDERS = ("cli", "compile", "runtime", "tokenizer_fix")
MODULES = sorted(path for folder in (PACKAGE, *FOLDERS) for path in (ROOT / folder).rglob("*.py"))

ALLOWED_FOLDERS = {
    PACKAGE: {"cli", "runtime"},
    "cli": {"compile", "runtime"},
    "compile": {"runtime", "tokenizer_fix"},
    "runtime": {"tokenizer_fix"},
    "tokenizer_fix": set(),
}
# What the compiler shares with the runtime: the artifact, the runner that its last stage tries it with, and how a
# chat template is parsed.
RUNTIME_FOR_COMPILE = {
    *("system", "artifact", "errors", "progress", "version", "model.batch", "model.model_runner", "chat.chat_template"),
}
# The folders of runtime/, from the ground up: each imports only from itself and from those before it. `system`,
# `errors`, `fields`, `memory`, `malloc_arenas`, `progress`, `version` and `optional` are modules, `__init__` is above
# all. `extras` is last: all else works without it.
RUNTIME_ORDER = (
    *(
        "system",
        "errors",
        "fields",
        "memory",
        "malloc_arenas",
        "progress",
        "version",
        "artifact",
        "model",
        "lora",
        "chat",
    ),
    *(
        "kv_log",
        "states",
        "cache",
        "store",
        "prefix",
        "speculation",
        "optional",
        "engine",
        "replay",
        "server",
        "router",
    ),
    "extras",
)
# The folders of compile/, in the same way: functions for a CPU, numbers of weights, kernels, operations on rows,
# layers, model families, file formats. The modules beside them, from `compiler` to `verification`, stand above all.
COMPILE_ORDER = ("codegen", "weights", "kernels", "ops", "layers", "families", "sources")
MAX_MODULES = 22  # of one folder
TOP = {  # what stands beside the folders of modules
    *(".ci", ".dockerignore", ".github", ".gitignore", ".types", "CHANGELOG.md", "Dockerfile", "LICENSE", "Makefile"),
    *("README.md", "mkdocs.yml", "pyproject.toml"),
    *("bench", "docs", "examples", "tests"),
}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of what `path` imports, at run time or for type checkers."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = _package(path)
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _package(path: Path) -> list[str]:
    """The parts of the name of a module's package."""
    return ["radixlm", *(part for part in path.relative_to(ROOT).parent.parts if part != PACKAGE)]


def ours(path: Path) -> Iterator[list[str]]:
    """The imports of `path` that are radixlm's own, as parts after `radixlm`: ["runtime", "errors"]."""
    for name in imports(path):
        if name.startswith("radixlm."):
            yield name.split(".")[1:]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _within(folder: str) -> list[Path]:
    """The modules of a folder and of its folders."""
    return [path for path in MODULES if ROOT / folder in path.parents]


def test_imports_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        folder = path.relative_to(ROOT).parts[0]
        reached = {parts[0] for parts in ours(path)} - ALLOWED_FOLDERS[folder] - {folder}
        wrong += [f"{_name(path)} imports {other}" for other in sorted(reached)]
    assert wrong == []


def test_the_compiler_knows_only_the_artifact_and_its_runner() -> None:
    wrong = []
    for path in _within("compile"):
        names = {".".join(parts[1:]) for parts in ours(path) if parts[0] == "runtime"} - {""}
        wrong += [f"{_name(path)} imports runtime.{name}" for name in sorted(names) if not _is_for_compile(name)]
    assert wrong == []


def _is_for_compile(name: str) -> bool:
    """Return whether a module of the runtime is one that the compiler shares, or leads to one."""
    return any(f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in RUNTIME_FOR_COMPILE)


def test_every_folder_of_the_runtime_has_its_place() -> None:
    folders = {path.name for path in (ROOT / "runtime").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    modules = {path.stem for path in (ROOT / "runtime").glob("*.py")} - {"__init__"}
    assert folders | modules | {"extras"} == set(RUNTIME_ORDER)  # all else works without them


def test_a_folder_of_the_runtime_imports_only_what_stands_below_it() -> None:
    wrong = []
    for path in _within("runtime"):
        if path.parent == ROOT / "runtime":
            continue
        place = RUNTIME_ORDER.index(path.relative_to(ROOT / "runtime").parts[0])
        above = set(RUNTIME_ORDER[place + 1 :])
        reached = _reached(path, ROOT / "runtime")
        wrong += [f"{_name(path)} reaches {name}" for name in reached if name.split(".")[0] in above]
    assert wrong == []


def test_every_folder_of_the_compiler_has_its_place() -> None:
    assert {path.name for path in (ROOT / "compile").iterdir() if any(path.glob("*.py"))} == set(COMPILE_ORDER)


def test_a_folder_of_the_compiler_imports_only_what_stands_below_it() -> None:
    wrong = []
    for path in _within("compile"):
        if path.parent == ROOT / "compile":
            continue
        place = COMPILE_ORDER.index(path.relative_to(ROOT / "compile").parts[0])
        below = set(COMPILE_ORDER[: place + 1])
        reached = _reached(path, ROOT / "compile")
        wrong += [f"{_name(path)} reaches {name}" for name in reached if name.split(".")[0] not in below]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert [_name(path) for path in MODULES if path in _all_behind(path)] == []


def test_a_folder_has_few_modules() -> None:
    wrong = []
    for folder in sorted({path.parent for path in MODULES}):
        count = len([path for path in folder.glob("*.py") if path.stem != "__init__"])
        if count > MAX_MODULES:
            wrong.append(f"{_name(folder)} has {count} modules, and may have {MAX_MODULES}")
    assert wrong == []


@cache
def _targets(path: Path) -> frozenset[Path]:
    """The modules of ours that `path` imports; an `__init__` that only lends its name is none of them."""
    found = {ROOT.joinpath(*parts).with_suffix(".py") for parts in ours(path)}
    packages = {ROOT.joinpath(*parts) / "__init__.py" for parts in ours(path)}
    return frozenset((found | packages) & set(MODULES) - {path})


@cache
def _all_behind(path: Path) -> frozenset[Path]:
    """All modules that are imported when `path` is, directly or by another."""
    behind: set[Path] = set()
    ahead = [path]
    while ahead:
        new = _targets(ahead.pop()) - behind
        behind |= new
        ahead += new
    return frozenset(behind)


def _reached(path: Path, top: Path) -> Iterator[str]:
    """The modules of the folder `top` behind `path`, as names: "cache.page_pool"."""
    for module in sorted(_all_behind(path)):
        if top in module.parents:
            yield ".".join(module.relative_to(top).with_suffix("").parts)


def test_only_the_compiler_imports_tvm_and_only_the_loader_of_libraries_tvm_ffi() -> None:
    wrong = []
    for path in MODULES:
        used = {name.split(".")[0] for name in imports(path)}
        if "tvm" in used and ROOT / "compile" not in path.parents:
            wrong.append(f"{_name(path)} imports tvm")
        if "tvm_ffi" in used and path != ROOT / "runtime" / "model" / "library.py":
            wrong.append(f"{_name(path)} imports tvm_ffi")
    assert wrong == []


OF_ONE_SYSTEM = re.compile(
    r"sys\.platform|platform\.system|/proc\b|/sys/|posix_fadvise|sched_[gs]etaffinity|sched_setscheduler|memfd_create|"
    r"os\.(preadv|pwritev|fsync|fdatasync|sendfile|setpriority|uname|sysconf)\b|MADV_(HUGE|POP)|RLIMIT_AS|ru_maxrss|"
    r"malloc_trim|sysctlbyname|F_FULLFSYNC"
)
NAMES_SYSTEMS = {
    "runtime/system.py": "all of it",
    "runtime/artifact/cpu.py": "what Linux says of processors and quotas, which is skipped where it says nothing",
    "compile/in_memory.py": "copies files in memory, which Linux alone has",
}


def test_one_module_knows_what_systems_offer() -> None:
    found = {_name(path) for path in MODULES if OF_ONE_SYSTEM.search(path.read_text(encoding="utf-8"))}
    assert found == set(NAMES_SYSTEMS)


def test_across_folders_imports_are_absolute_and_inside_one_relative() -> None:
    wrong = []
    for path in MODULES:
        if ROOT / "compile" in path.parents:
            continue
        folder = path.relative_to(ROOT).parts[0]
        depth = len(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom):
                if node.level > depth:
                    wrong.append(f"{_name(path)}:{node.lineno} is relative to another folder")
                if (node.module or "").startswith(f"radixlm.{folder}."):
                    wrong.append(f"{_name(path)}:{node.lineno} is absolute in its own folder")
    assert wrong == []


def test_every_folder_of_modules_is_a_listed_package_and_no_other_is() -> None:
    listed = set(_pyproject()["tool"]["setuptools"]["packages"])
    on_disk = {".".join(_package(path)) for path in MODULES}
    if not (ROOT / "runtime" / "extras").is_dir():  # it was removed
        listed = {name for name in listed if not name.startswith("radixlm.runtime.extras")}
    assert listed == on_disk


def test_every_top_folder_is_mapped_typed_and_linked_for_type_checkers() -> None:
    mapped = {"radixlm": PACKAGE} | {f"radixlm.{folder}": folder for folder in FOLDERS}
    assert _pyproject()["tool"]["setuptools"]["package-dir"] == mapped
    folder = ROOT / ".types" / "radixlm"
    links = {path.name: path.resolve() for path in folder.iterdir() if path.name != "__pycache__"}
    own = {path.name: path for path in (ROOT / PACKAGE).iterdir() if path.suffix in (".py", ".typed")}
    assert links == own | {folder: ROOT / folder for folder in FOLDERS}
    assert all((ROOT / folder / "py.typed").is_file() for folder in (PACKAGE, *FOLDERS))


def test_nothing_lies_beside_the_folders_that_has_no_place_there() -> None:
    """Files that a tool left in the repository were once committed with a change."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()} - TOP - {PACKAGE, *FOLDERS}
    assert [name for name in sorted(top) if not re.fullmatch(r"requirements(-\w+)?\.lock", name)] == []


def test_every_module_says_what_it_knows() -> None:
    silent = [_name(path) for path in MODULES if not ast.get_docstring(_tree(path))]
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
        "def h():\n    import i\nif TYPE_CHECKING:\n    import j\nelse:\n    pass\n"
    )
    assert set(imports(module)) == {
        *("a.b", "c", "c.d", "radixlm.runtime.server", "radixlm.runtime.server.e"),
        *("radixlm.runtime.f", "radixlm.runtime.f.g", "i", "j"),
    }
