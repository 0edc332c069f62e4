"""Lay out the two distributions that are published, as folders for build frontends.

Usage: .ci/distributions.py FOLDER, which gets FOLDER/radixlm-serve and FOLDER/radixlm. The first serves
artifacts, the second has the compiler, and depends on the first. Both have the command `radixlm`: `uvx` and pipx use
commands only of the requested distribution. pyproject.toml says which packages and dependencies are the
compiler's. Standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVE, FULL = "radixlm-serve", "radixlm"
TEXTS = ("README.md", "LICENSE")
DESCRIPTION = "Serve artifacts that radixlm has compiled, without its compiler: language models with a prefix cache."


def main(folder: Path) -> None:
    """Write both folders."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = version_of(ROOT)
    of_compiler = declared["tool"]["radixlm"]["compiler"]
    project, setuptools = declared["project"], declared["tool"]["setuptools"]
    serving, compiling = split(project["dependencies"], of_compiler)
    ours, theirs = split(setuptools["packages"], of_compiler)
    extras = {name: project["optional-dependencies"][name] for name in declared["tool"]["radixlm"]["extras"]}
    common = {key: value for key, value in project.items() if key not in {"dynamic", "optional-dependencies"}}
    common |= {"version": version, "optional-dependencies": extras}
    serve = {"name": SERVE, "description": DESCRIPTION, "dependencies": serving}
    full = {"name": FULL, "dependencies": [f"{SERVE}=={version}", *compiling]}
    for about, packages in ((serve, ours), (full, theirs)):
        tables = {
            "build-system": declared["build-system"],
            "project": {**common, **about},
            "tool": {"setuptools": of_packages(setuptools, packages)},
        }
        lay_out(folder / about["name"], tables, packages, f"{project['urls']['Repository']}/blob/v{version}")


def version_of(root: Path) -> str:
    """Return the version that the code declares.

    >>> version_of(ROOT).count(".")
    2
    """
    [version] = re.findall(r'^VERSION = "(.+)"$', (root / "runtime" / "version.py").read_text("utf-8"), re.MULTILINE)
    return str(version)


def split(names: Iterable[str], of_compiler: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the packages or requirements that serving needs, and those that only compiling does.

    >>> split(["click>=8.1", "radixlm.compile.ops", "gguf==1"], ["gguf", "radixlm.compile"])
    (['click>=8.1'], ['radixlm.compile.ops', 'gguf==1'])
    """
    pattern = re.compile(rf"({'|'.join(map(re.escape, of_compiler))})(?![\w-])")
    found: tuple[list[str], list[str]] = ([], [])
    for name in names:
        found[pattern.match(name) is not None].append(name)
    return found


def of_packages(setuptools: Mapping[str, Any], packages: list[str]) -> dict[str, Any]:
    """Return setuptools' table for some of the packages."""
    tops = {".".join(name.split(".")[:2]) for name in packages}
    return {
        "packages": packages,
        "package-dir": {name: folder for name, folder in setuptools["package-dir"].items() if name in tops},
        "package-data": {
            name: patterns for name, patterns in setuptools["package-data"].items() if name == "*" or name in packages
        },
    }


def lay_out(folder: Path, tables: Mapping[str, Any], packages: list[str], url: str) -> None:
    """Write a distribution's folder: its pyproject.toml, packages and texts. Links of README begin with `url`."""
    for package in packages:
        place = folder_of(package)
        (folder / place).mkdir(parents=True, exist_ok=True)
        for path in (ROOT / place).iterdir():
            if path.is_file():
                shutil.copyfile(path, folder / place / path.name)
    for name, patterns in tables["tool"]["setuptools"]["package-data"].items():
        found = [path for pattern in patterns if "/" in pattern for path in ROOT.glob(_place(name, pattern))]
        for source in filter(Path.is_file, found):
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name in TEXTS:
        shutil.copyfile(ROOT / name, folder / name)
    readme = folder / "README.md"
    readme.write_text(re.sub(r"\]\((?![a-z]+://|#)", f"]({url}/", readme.read_text("utf-8")), encoding="utf-8")
    (folder / "pyproject.toml").write_text(
        "".join(f"[{name}]\n{_entries(table)}\n" for name, table in tables.items()), encoding="utf-8"
    )


def folder_of(package: str) -> Path:
    """Return where a package is in the repository: `radixlm` itself has a folder next to those of its subpackages.

    >>> str(folder_of("radixlm.runtime.engine")), str(folder_of("radixlm"))
    ('runtime/engine', 'package')
    """
    return Path(*package.split(".")[1:] or ["package"])


def _place(package: str, pattern: str) -> str:
    return f"{folder_of(package).as_posix()}/{pattern}"


def _entries(table: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in table.items())


def toml(value: Any) -> str:
    """Return a value in TOML, in which strings and lists are as in JSON.

    >>> toml({"a.b": ["x", True]})
    '{"a.b" = ["x", true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
