"""What README and the pages in docs say can be typed can be typed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from radixlm.cli.agent.clients import CLIENTS
from radixlm.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
MAX_README_LINES = 150


def blocks(language: str) -> Iterator[str]:
    """The fenced blocks of one language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of a shell block that calls radixlm."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("radixlm ")]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("bodies.jsonl", "recording.jsonl"):  # `warm` and `replay` ask for files that are there
        Path(file).touch()
    name, *arguments = shlex.split(line, comments=True)[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, arguments)  # raises UsageError on an unknown option or value


def test_the_readme_shows_every_command() -> None:
    assert {line.split()[1] for line in commands()} == set(COMMANDS)


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `radixlm ([a-z-]+)", page, re.MULTILINE)) == sorted(COMMANDS)


def test_the_family_that_the_page_shows_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```python\n(class .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown in (ROOT / "compile" / "families" / "exaone4.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(("row", "options"), [("by ids: ", ["--match", "exact"]), ("by text, ", [])])
def test_the_readme_says_what_its_talk_reuses(row: str, options: list[str], smollm2_artifact: Path) -> None:
    talk = ["--turns", str(ROOT / "examples" / "talk.json"), "--no-generate", "--json"]
    done = CliRunner().invoke(cli, ["explain-cache", str(smollm2_artifact), *talk, *options])
    turns = json.loads(done.output)
    [said] = re.findall(rf"^\| {row}.*$", README, re.MULTILINE)
    assert re.findall(r"(\d+) of (\d+)", said) == [
        (str(turn["num_cached_tokens"]), str(turn["num_prompt_tokens"])) for turn in turns[1:]
    ]


OF_LM_EVAL = {"--model", "--tasks"}
OF_OTHER_ENGINES = {"--slot-save-path", "--flash-attn", "--gpu", "--dtype"}
OF_PIP_AND_DOCKER = {"--find-links", "--build-arg", "--platform", "--cpus"}
OF_WSL = {"--install", "--shutdown"}


def test_every_option_that_the_readme_names_exists() -> None:
    options = {name for command in COMMANDS for name in _options(command)}
    of_agents = {word for client in CLIENTS.values() for word in client.run.split() if word.startswith("--")}
    of_others = of_agents | OF_LM_EVAL | OF_PIP_AND_DOCKER | OF_WSL | OF_OTHER_ENGINES
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ALL)) <= options | of_others


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)`", ALL) + re.findall(r"^make ([a-z-]+)", ALL, re.MULTILINE)
    assert {"run", "test"} <= set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_the_readme_is_short_and_links_every_page() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES
    assert all(f"(docs/{page.name})" in README for page in PAGES[1:])


def test_the_python_of_the_readme_uses_what_the_api_has() -> None:
    from radixlm.runtime import Engine, GenerationStream

    names = {*dir(Engine), *dir(GenerationStream)}
    [block] = (block for block in blocks("python") if "from radixlm" in block)  # the other is run by tests/clients
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.attr in names | {"text"}, ast.unparse(node)


def _options(name: str) -> Iterator[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.get_params(click.Context(command)):
        yield from (*parameter.opts, *parameter.secondary_opts)
