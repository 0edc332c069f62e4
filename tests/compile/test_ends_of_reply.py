"""Which of the well-known tokens end a reply."""

from __future__ import annotations

from radixlm.compile.sources.gguf import _eos_token_ids
from radixlm.compile.sources.source import ends_of_reply


def test_the_end_of_a_part_ends_no_reply() -> None:
    """gpt-oss's replies ended behind their thoughts."""
    tokens = ["a", "<|return|>", "<|call|>", "<|end|>"]
    assert _eos_token_ids({"tokenizer.ggml.eos_token_id": 1}, tokens) == (1, 2)
    assert _eos_token_ids({}, ["a", "<|end|>"]) == (1,)
    assert ends_of_reply(("<|end|>", "<|call|>")) == ["<|end|>", "<|call|>"]
