"""A coding agent on a model of one's own: two agents at one server, and a first prompt that is there the next day."""

from __future__ import annotations

import json
import tomllib

from .conftest import Clone, Newcomer

PAGE = "docs/agents.md"
SYSTEM = {"role": "system", "content": "You are a coding agent. " * 20}


def test_two_agents_are_told_of_one_server(clone: Clone, newcomer: Newcomer) -> None:
    with newcomer.serving(clone.shown_line("radixlm agent codex model.gguf")) as served:
        said = served.wait_until_said("run: codex --profile radixlm")  # its last line, after the file is written
        codex = tomllib.loads((newcomer.home / ".codex" / "radixlm.config.toml").read_text(encoding="utf-8"))
        assert codex["model_providers"]["radixlm"]["base_url"] == f"{served.url}/v1"
        assert "does not fit into the context of 512 tokens" in said, "a tiny model's is too short"
        newcomer.types(clone.shown_line("radixlm agent opencode --url", PAGE))
        opencode = json.loads((newcomer.home / ".config" / "opencode" / "radixlm.json").read_text(encoding="utf-8"))
        assert opencode["provider"]["radixlm"]["options"]["baseURL"] == f"{served.url}/v1"


def test_the_first_prompt_is_computed_before_it_is_asked(clone: Clone, newcomer: Newcomer) -> None:
    first, second = ([SYSTEM, {"role": "user", "content": text}] for text in ("Fix calc.py.", "Add a test."))
    (newcomer.folder / "bodies.jsonl").write_text(json.dumps({"messages": first}) + "\n", encoding="utf-8")
    assert "1 prompts of" in newcomer.types(clone.shown_line("radixlm warm"))
    with newcomer.serving("radixlm serve smollm2.radixlm --store prefixes") as served:
        served.wait_until_said("tokens of earlier prefixes")
        usage = served.asks(second)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 80
