"""Python without reading more than a page: each block of the page runs after at most ten lines with a model."""

from __future__ import annotations

import json

import pytest

from .conftest import Clone, Newcomer

PAGE = "docs/python.md"
OPENED = """\
from radixlm import Engine
engine = Engine("smollm2.radixlm")
"""


def test_the_readmes_first_script(clone: Clone, newcomer: Newcomer) -> None:
    code = clone.shown_code("from radixlm import Engine")
    assert "prompt_tokens" in newcomer.runs(code)


def test_the_pages_first_script(clone: Clone, newcomer: Newcomer) -> None:
    assert len(newcomer.runs(clone.shown_code('print(engine.chat([{"role"', PAGE)).split()) > 2


def test_a_files_name_is_enough(newcomer: Newcomer) -> None:
    said = newcomer.runs('from radixlm import Engine\nprint(Engine("model.gguf").generate("x", max_tokens=5).text)\n')
    assert "compiling model.gguf, once" in said


def test_parameters_in_three_ways(clone: Clone, newcomer: Newcomer) -> None:
    newcomer.runs("from radixlm import SamplingParams\n" + OPENED + clone.shown_code('{"max_tokens": 5}', PAGE))


def test_structured_output(newcomer: Newcomer) -> None:
    """As the page says, with a schema in place of pydantic, which radixlm does not need."""
    age = {"type": "integer", "minimum": 0, "maximum": 40}  # without a maximum some replies are an endless number
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"]}
    code = f"""
reply = engine.chat([{{"role": "user", "content": "How old is a cat?"}}], response_format={schema}, max_tokens=256)
print(reply.text)
"""
    assert isinstance(json.loads(newcomer.runs(OPENED + code))["age"], int)


def test_many_prompts(clone: Clone, newcomer: Newcomer) -> None:
    shown = clone.shown_code("generate_many(prompts", PAGE)
    said = newcomer.runs(OPENED + 'prompts = ["The sky is", "", "Two and two are"]\n' + shown)
    assert "the prompt is empty" in said


def test_asyncio(clone: Clone, newcomer: Newcomer) -> None:
    body = "".join(f"    {line}\n" for line in clone.shown_code("asyncio.gather", PAGE).splitlines())
    begins = 'conversations = [messages := [{"role": "user", "content": "Name a tree."}]]\n'
    code = f"import asyncio\nfrom radixlm import Engine\n{begins}async def main():\n{body}asyncio.run(main())\n"
    assert newcomer.runs(code).strip()


@pytest.mark.parametrize("mistake", ['engine.generate("x", max_token=5)', "engine.generate(None)"])
def test_a_mistake_is_named(newcomer: Newcomer, mistake: str) -> None:
    code = f"try:\n    {mistake}\nexcept TypeError as error:\n    print(error)\n"
    assert "AttributeError" not in newcomer.runs(OPENED + code)
