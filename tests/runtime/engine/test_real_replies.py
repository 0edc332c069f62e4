"""Real models, from Q4_K_M files that are compiled as `radixlm serve FILE.gguf` does it, answer sensibly."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def test_gemma_goes_on_counting(gemma3_artifact: Path) -> None:
    with Engine(gemma3_artifact) as engine:
        assert engine.generate("1, 2, 3, 4, 5, 6,", GREEDY).text.startswith(" 7, 8, 9, 10,")


@pytest.mark.long
def test_qwen_knows_a_capital_and_says_so_in_a_sentence(qwen2_artifact: Path) -> None:
    with Engine(qwen2_artifact) as engine:
        reply = engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert reply.text == "The capital of France is Paris."
    assert reply.finish_reason == "stop"
