"""A laptop, a model's name and a GGUF file: to a first chat, and to a server for other programs."""

from __future__ import annotations

import json
import re
import shutil

from ..stand_in_hub import StandInHub
from .conftest import Clone, Newcomer

HUB_MODEL = "docs/getting-models.md"


def test_make_run_talks(clone: Clone) -> None:
    reply = re.search(r"^> hi, who are you\?\n(.+?)\n\d+ tokens · .* tokens/s", clone.said, re.MULTILINE | re.DOTALL)
    assert reply is not None and len(reply[1].split()) > 1, clone.said


def test_the_command_is_found_after_make_run(clone: Clone, newcomer: Newcomer) -> None:
    shown = clone.shown_line(". .venv/bin/activate").partition("#")[0]
    newcomer.variables["PATH"] = "/usr/bin:/bin"
    said = newcomer.types(f"cd {clone.path} && {shown} && radixlm --help")
    assert "radixlm run smollm2" in said and "serve" in said


def test_a_model_by_name_is_got_once_and_kept(clone: Clone, newcomer: Newcomer) -> None:
    hub = StandInHub(newcomer.home / "hub")
    command = clone.shown_line("radixlm run hf:", HUB_MODEL)
    repository, _, quantization = command.partition("hf:")[2].partition(":")
    (hub.root / repository).mkdir(parents=True)
    shutil.copy(newcomer.folder / "model.gguf", hub.root / repository / f"tiny-{quantization}.gguf")
    with hub.running():
        newcomer.variables["HF_ENDPOINT"] = hub.url
        assert "> hi" in newcomer.types(command, answers="hi\n")
    newcomer.variables["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no network
    assert "> hi" in newcomer.types(command, answers="hi\n")
    kept = rows(newcomer.types(clone.shown_line("radixlm list")))
    assert {"compiled", "download"} <= {word for row in kept for word in row}
    newcomer.types(clone.shown_line("radixlm rm"))  # 20 GB are kept
    assert rows(newcomer.types("radixlm list")) == kept
    newcomer.types(f"radixlm rm hf:{repository}:{quantization}")
    assert "compiled" not in newcomer.types("radixlm list")


def test_a_file_is_served_to_other_programs(clone: Clone, newcomer: Newcomer) -> None:
    with newcomer.serving(clone.shown_line("radixlm serve model.gguf")) as served:
        for told in (f"serving model at {served.url}/v1", f"web UI: {served.url}/", "model name: model; context: "):
            served.wait_until_said(told)
        asked = clone.shown_line("curl localhost:8000/v1/chat/completions").replace("true", "false")
        reply = json.loads(newcomer.types(f"{asked} -s"))
        assert reply["choices"][0]["message"]["role"] == "assistant"
        assert "error" not in served.said.lower()


def test_text_goes_on(clone: Clone, newcomer: Newcomer) -> None:
    assert len(newcomer.types(clone.shown_line("radixlm generate") + " --temperature 0").split()) > 3


def rows(listed: str) -> list[list[str]]:
    """The rows of `radixlm list` without the last column, which changes as time passes."""
    return [line.split()[:4] for line in listed.splitlines()]
