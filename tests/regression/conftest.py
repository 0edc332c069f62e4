"""Real tokenizers behind engines whose model follows a script."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from ..runtime.fake_artifact import FakeArtifact, fake_artifact

TOKENIZERS = Path(__file__).resolve().parent.parent / "data" / "tokenizers"
# As MLC-LLM's conversation templates render them: `[/INST] ` is Llama-2's generation prompt, its last space a token.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST] "
    "{% else %}{{ m.content }} </s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LoadArtifact = Callable[[str], FakeArtifact]


@pytest.fixture(scope="session")
def load_artifact(request: pytest.FixtureRequest) -> LoadArtifact:
    """An artifact by the name of its tokenizer; skips where Meta's are not."""

    def load(name: str) -> FakeArtifact:
        if name == "tiny_spm":
            text = (TOKENIZERS / "tiny_spm.json").read_text(encoding="utf-8")
            return fake_artifact(text, LLAMA2, vocab_size=500, bos_token_id=1, eos_token_id=2)
        if name == "smollm2":
            text = gzip.decompress((TOKENIZERS / "smollm2.json.gz").read_bytes()).decode()
            return fake_artifact(text, CHATML, vocab_size=49152, bos_token_id=1, eos_token_id=2)
        data_dir: Path = request.getfixturevalue("data_dir")
        text = (data_dir / "tokenizers" / name / "tokenizer.json").read_text(encoding="utf-8")
        if name == "llama3":
            return fake_artifact(text, LLAMA3, vocab_size=128256, bos_token_id=128000, eos_token_id=128009)
        return fake_artifact(text, LLAMA2, vocab_size=32000, bos_token_id=1, eos_token_id=2)

    return load
