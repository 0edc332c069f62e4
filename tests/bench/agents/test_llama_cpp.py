"""The model that llama.cpp is given for the replays has their tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from bench.agents.models import MODELS, artifact_of
from bench.replay.weightless import write_weightless


def test_a_weightless_model_has_the_tokens_and_the_template(tmp_path: Path) -> None:
    artifact = artifact_of(next(iter(MODELS)))
    write_weightless(tmp_path / "model.gguf", artifact)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == artifact.chat_template
    tokens = fields["tokenizer.ggml.tokens"].contents()
    spec = json.loads(artifact.tokenizer_json)
    assert all(tokens[id] == text for text, id in spec["model"]["vocab"].items())
    assert all(tokens[added["id"]] == added["content"] for added in spec["added_tokens"])
