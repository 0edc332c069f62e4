"""Write the sources of the documentation site: the pages of docs, README as the first, and references made from code.

Usage: .ci/docs.py OUT. Run where radixlm is installed.

`command-line.md` gets the help of every command at its end, `python-reference.md` has the signatures and docstrings of
what `import radixlm` exports. Links to files outside of docs become links to the repository.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import radixlm
from radixlm.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parent.parent
_WIDTH = 100


def write_site(out: Path) -> None:
    """Write all pages to the directory `out`, which is made empty first."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files = declared["project"]["urls"]["Repository"] + "/blob/main"
    for page in out.glob("*.md"):
        page.write_text(re.sub(r"\]\(\.\./", f"]({files}/", page.read_text(encoding="utf-8")), encoding="utf-8")
    (out / "index.md").write_text(_first_page(files), encoding="utf-8")
    with (out / "command-line.md").open("a", encoding="utf-8") as page:
        page.write("\n".join(_cli()))
    (out / "python-reference.md").write_text("\n".join(_python()), encoding="utf-8")


def _first_page(files: str) -> str:
    """Return README, with its links as on the site."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda link: "](" if link[1] else f"]({files}/", text)


def _cli() -> Iterator[str]:
    yield "\n## Help of each command\n"
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield from _help(command, f"radixlm {name}", level=3)


def _help(command: click.Command, path: str, *, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path, max_content_width=_WIDTH, terminal_width=_WIDTH)
    yield f"{'#' * level} {path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _help(inner, f"{path} {name}", level=level + 1)


def _python() -> Iterator[str]:
    yield "# Python reference\n\nMade from docstrings. [The Python API](python.md) shows how to use it.\n"
    for name in radixlm.__all__:
        value = getattr(radixlm, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield _described(name, value, level=2)
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if not method.startswith("_") and callable(getattr(value, method)):
                    yield _described(f"{name}.{method}", inspect.unwrap(getattr(value, method)), level=3)
                elif isinstance(function, property) and not method.startswith("_"):
                    yield f"### {name}.{method}\n\n```text\n{inspect.getdoc(function) or ''}\n```\n"


def _described(name: str, value: object, *, level: int) -> str:
    signature = ""
    if callable(value):
        try:
            signature = str(inspect.signature(value))
        except ValueError:  # such as an exception that takes what all do
            signature = "(...)"
    return f"{'#' * level} {name}\n\n```python\n{name}{signature}\n```\n\n```text\n{inspect.getdoc(value) or ''}\n```\n"


if __name__ == "__main__":
    write_site(Path(sys.argv[1]))
