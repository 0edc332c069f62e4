"""Engines that cost nothing, opened in replicas: one whose model knows its KV, and one that says nothing."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.engine_options import OpenRunner
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from ray import serve

from bench.replay.models import MODELS, artifact

from ..goldens.tiny_models import BOS, CHAT_TEMPLATE, IM_END, tokenizer
from ..runtime.fake_artifact import fake_artifact
from ..runtime.fake_model import FakeModel

VOCAB_SIZE = 320
SMOLLM2_TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "tokenizers" / "smollm2.json.gz"
KV_BYTES = 1 << 25


@dataclass(frozen=True)
class SlowEngine:
    """Opens an engine whose steps take `step_s`.

    `pids` gets its process under the replica's name, and the requests of its last step under "NAME.requests".
    """

    pids: Path
    step_s: float

    def __call__(self) -> Engine:
        name = serve.get_replica_context().deployment
        (self.pids / name).write_text(str(os.getpid()))
        return fake_engine(partial(self._open_runner, self.pids / f"{name}.requests"))

    def _open_runner(self, requests: Path, _: object, num_pages: int, __: object) -> FakeModel:
        def before(batch: Batch) -> None:
            requests.write_text(str(len(batch.arrays.page_table)))
            time.sleep(self.step_s)

        model = FakeModel(num_pages, VOCAB_SIZE)
        model.before = before
        return model


def fake_engine(open_runner: OpenRunner) -> Engine:
    """An engine of a small tokenizer and a template, with whatever model."""
    model: Any = fake_artifact(
        json.dumps(tokenizer(VOCAB_SIZE)),
        CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        context_length=2048,
    )
    return Engine(model, kv_cache_bytes=KV_BYTES, max_num_seqs=16, open_runner=open_runner)


def open_silent_engine() -> Engine:
    """SmolLM2's tokenizer and template, and no model: every prompt is cached as if there were one."""
    tokenizer_json = gzip.decompress(SMOLLM2_TOKENIZER.read_bytes()).decode()
    silent = artifact(MODELS["smollm2"], tokenizer_json)
    vocab_size = silent.manifest.model.vocab_size
    return Engine(silent, kv_cache_bytes=KV_BYTES, open_runner=lambda *_: ScriptedRunner(vocab_size))
