"""What llama.cpp computes for a tiny family: the second witness of goldens. Needs xllamacpp, which no test does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Self

import numpy as np
import xllamacpp

from . import tiny_gguf
from .tiny_models import TinyModel

WHOLE_CHARACTER = 40  # a token that is no part of a character: a sampled part of one comes without probabilities


class Unknown(Exception):
    """llama.cpp cannot be asked about this family."""


class LlamaCpp:
    """A tiny family in llama.cpp: float32 weights, keys and values, and attention without shortcuts."""

    def __init__(self, tiny: TinyModel, adapter: Path | None = None) -> None:
        """Load a model, with a LoRA adapter if one is given."""
        if tiny.no_witness:
            raise Unknown(tiny.no_witness)
        self._folder = tempfile.TemporaryDirectory()
        params = xllamacpp.CommonParams()
        try:
            params.model.path = str(tiny_gguf.write(tiny, Path(self._folder.name) / "tiny.gguf"))
        except ValueError as why:
            raise Unknown(str(why)) from why
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = tiny.context_length, 1, 0, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full, params.warmup, params.ctx_shift, params.port = True, False, False, 0
        params.fit_params = False
        if adapter is not None:
            lora = xllamacpp.CommonAdapterLoraInfo()
            lora.path, lora.scale = str(adapter), 1.0
            params.lora_adapters = [lora]
        self._vocab_size = tiny.vocab_size
        self._server = xllamacpp.Server(params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        del self._server
        self._folder.cleanup()

    def distance(self, ids: list[int], rows: np.ndarray, golden: np.ndarray) -> float:
        """The largest difference over the golden's standard deviation, at `rows` of a prompt.

        llama.cpp gives logarithms of probabilities, so logits are compared but for what they have in common.
        """
        worst = 0.0
        for row in rows:
            found = self._log_probs(ids[: row + 1])
            off = found - golden[row]
            worst = max(worst, float(np.abs(off - np.median(off)).max()))
        return worst / float(golden.std())

    def _log_probs(self, ids: list[int]) -> np.ndarray:
        answer = self._server.handle_completions(
            {
                "prompt": ids,
                "n_predict": 1,
                "n_probs": self._vocab_size,
                "cache_prompt": False,
                "logit_bias": [[WHOLE_CHARACTER, 1000.0]],
            }
        )
        row = np.full(self._vocab_size, np.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        assert np.isfinite(row).all()
        return row
