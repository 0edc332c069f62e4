"""Prose keeps to plain English in the field's words: what a machine can see of that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from radixlm.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_SENTENCE_WORDS = 40

PRIVATE = {
    r"dialects?": "API",
    r"guess(es|ed|ing)?": "draft token, speculative decoding",
    r"thoughts?": "reasoning",
    r"talks?": "conversation",
    r"nobody|whoever": "no request, the caller",
    r"mended": "fixed",
    r"words of the system|system's words": "system prompt",
}
"""Words that only this project used, and the field's."""

NAMES = [r"`[^`]*`", r"talk\.json", r"\"What guessing brings\""]
"""What is quoted from code, files and headings, and has the words that it has."""

PLAIN_DOCSTRINGS = (".ci", "bench", "cli", "compile", "examples", "package", "runtime", "tokenizer_fix")
"""Folders of which every docstring is checked."""

WHAT_CLAUSE = re.compile(r"(That|What|Which|Whether|Where|How|Who|When|As|Of|In|By|From|With|If|For|Beside|Behind)\b")
"""Words at the beginning of a docstring that has neither a verb nor a noun phrase there."""


def prose(page: Path) -> str:
    """A page without code, tables' delimiters and links' targets."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page's paragraphs and lists; cells of tables are none."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.) )", prose(page)):
        if not paragraph.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))


def helps() -> Iterator[tuple[str, str]]:
    """The help of each command."""
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield name, command.get_help(click.Context(command, info_name=name))


def private_words(text: str) -> list[str]:
    """Those in a text, each with the word of the field."""
    for name in NAMES:
        text = re.sub(name, "", text)
    found = ((re.search(rf"\b({word})\b", text, re.IGNORECASE), instead) for word, instead in PRIVATE.items())
    return [f"{match[0]}: {instead}" for match, instead in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_words_of_the_field(page: Path) -> None:
    assert private_words(prose(page)) == []


@pytest.mark.parametrize(("name", "text"), list(helps()))
def test_help_has_the_words_of_the_field(name: str, text: str) -> None:
    assert private_words(text) == [], name


def test_messages_have_the_words_of_the_field() -> None:
    """Strings of the product with a space are errors, warnings and help."""
    private = []
    for folder in ("cli", "compile", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    found = private_words(node.value) if " " in node.value else []
                    private += [f"{path.relative_to(ROOT)}:{node.lineno}: {each}" for each in found]
    assert private == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    assert [each for each in sentences(page) if len(each.split()) > MAX_SENTENCE_WORDS] == []


def test_docstrings_say_what_is_done_or_what_something_is() -> None:
    clauses = []
    for folder in PLAIN_DOCSTRINGS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if WHAT_CLAUSE.match(text):
                        clauses.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert clauses == []
