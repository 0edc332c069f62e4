"""After a restart with a store the pages of a reply are on disk, and so is the alias that leads to them.

A template that trims renders a reply as another text than the model generated. The server that gave the reply knows
both; a process that knew only the pages would compute all of a reply that lies on its disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.model.batch import UInt8Array

from ..runtime.eager_loads import load_always
from ..runtime.fake_artifact import FakeArtifact
from .conftest import LoadArtifact
from .scripted_talk import CountingRunner, Said, ScriptedTalk

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "What did the keeper write down?"}
REPLY = "\n" + "The lighthouse keeper wrote down the weather of every day. " * 10


class StoringRunner(CountingRunner):
    """Pages are all alike: what is in them makes no difference to what it says."""

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        out[: len(page_ids)] = 0

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None: ...


class StoringTalk(ScriptedTalk):
    """One process over a store."""

    def __init__(self, artifact: FakeArtifact, store: Path) -> None:
        self._end = artifact.manifest.tokenizer.eos_token_ids[0]
        self._runner = StoringRunner(artifact.manifest.model.vocab_size)
        model: Any = artifact
        self.engine = Engine(model, open_runner=lambda *_: self._runner, max_num_seqs=4, store=store, speculate="off")

    def begin(self) -> str:
        """The first turn; its reply."""
        return self.chat([QUESTION], self.engine.tokenizer.encode_inside(REPLY)).completion.text

    def go_on(self, reply: str) -> Said:
        """The next turn."""
        messages = [QUESTION, {"role": "assistant", "content": reply}, QUESTION]
        return self.chat(messages, self.engine.tokenizer.encode_inside("The weather."))


def test_a_reply_that_a_template_trims_is_found_on_disk_after_a_restart(
    load_artifact: LoadArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_always(monkeypatch)
    artifact = replace(load_artifact("smollm2"), chat_template=TRIMMING)
    with StoringTalk(artifact, tmp_path / "one") as talk:
        without = talk.go_on(talk.begin())
    with StoringTalk(artifact, tmp_path / "other") as talk:
        reply = talk.begin()
    with StoringTalk(artifact, tmp_path / "other") as talk:
        after = talk.go_on(reply)
    assert without.weakest_kind == "alias"
    assert after.num_prefilled <= without.num_prefilled + PAGE_SIZE, "no more than the page that was not full"
