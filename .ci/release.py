"""Make everything that a release consists of, and check it; publishing it is a person's step (docs/development.md).

Usage: .ci/release.py FOLDER, which gets wheels, source archives and bills of materials. Run with the environment of
requirements-wheel.lock; `make release` does.
"""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from build_distributions import build
from distributions import FULL, ROOT, SERVE, version_of

UNRELEASED = "not released yet"


def main(folder: Path) -> None:
    """Build twice and compare, check the texts, and list what an installation consists of."""
    version = version_of(ROOT)
    heading = check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    folder.mkdir(parents=True)
    build(folder)
    with tempfile.TemporaryDirectory(prefix="radixlm-again-") as again:
        build(Path(again))
        names = sorted(path.name for path in folder.iterdir())
        _, differing, missing = filecmp.cmpfiles(folder, again, names, shallow=False)
        if differing or missing:
            raise SystemExit(f"built twice, these files differ: {', '.join(differing + missing)}")
    tools = Path(sys.executable).parent
    _run(tools / "twine", "check", "--strict", *(folder / name for name in names))
    for name in (SERVE, FULL):
        bill_of_materials(tools, name, version, folder)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>10,} {path.name}")
    if UNRELEASED in heading:
        print(f"before it is published: CHANGELOG.md says that {version} is {UNRELEASED}")


def check_changelog(text: str, version: str) -> str:
    """Return the heading of a version's section, which must be the first and have entries.

    >>> check_changelog("# Changelog\\n\\n## 1.0, today\\n\\n- One change.\\n", "1.0")
    '1.0, today'
    """
    found = re.search(r"^## (\S+?)(,.*)?\n\n(?:### Added\n\n[*-]|- )", text, re.MULTILINE)
    if found is None or found[1] != version:
        raise SystemExit(
            f"CHANGELOG.md begins with {found and found[1]}, and the version is {version}; write its section"
        )
    return f"{found[1]}{found[2] or ''}"


def bill_of_materials(tools: Path, name: str, version: str, folder: Path) -> None:
    """Write what one of the distributions installs into a clean environment, as CycloneDX's JSON."""
    with tempfile.TemporaryDirectory(prefix="radixlm-clean-") as clean:
        python = f"{clean}/bin/python"
        _run(tools / "uv", "venv", "--quiet", "--python", sys.executable, clean)
        found = ("--find-links", folder, f"{name}=={version}")
        _run(tools / "uv", "pip", "install", "--quiet", "--python", python, *found)
        bill = folder / f"{name}-{version}.cdx.json"
        _run(tools / "cyclonedx-py", "environment", "--output-reproducible", "--output-file", bill, python)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
