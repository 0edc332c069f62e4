"""Measure the cost of sampling a token from a row of logits, by sampling parameters, compared with a step of the model.

    python -m bench.engine.sampling_cost ARTIFACT

Logits are random, as many as the artifact's vocabulary: of a steep kind, as in models (the largest few hold
most of the mass), and of a flat one (normal, deviation 3). A figure is the least of all rounds, in ms per row, of
`ROWS` rows sampled one after the other; finding the largest logits, which each step does anyway, is not counted.
"""

from __future__ import annotations

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.sampler import StepLogits, sample_row
from radixlm.runtime.engine.step.sampler_state import SamplerState
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from ..options import read_options
from ..timing import best_s

ROWS = 8
WAYS = {
    "temperature 1": SamplingParams(),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_p 0.9, temperature 0.7": SamplingParams(top_p=0.9, temperature=0.7),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "min_p 0.001": SamplingParams(min_p=0.001),
    "top_k 40": SamplingParams(top_k=40),
    "top_k 200": SamplingParams(top_k=200),
    "logprobs 20, greedy": SamplingParams(logprobs=20, temperature=0.0),
    "logprobs 20, temperature 1": SamplingParams(logprobs=20),
    "top_n_sigma 1": SamplingParams(top_n_sigma=1.0),
    "repetition_penalty 1.1, top_k 40": SamplingParams(repetition_penalty=1.1, top_k=40),
    "repetition_penalty 1.1": SamplingParams(repetition_penalty=1.1),
    "frequency_penalty 0.5, greedy": SamplingParams(frequency_penalty=0.5, temperature=0.0),
}


def main() -> None:
    """Time the sampling of a token by sampling parameters, and a step of the model; print a line for each."""
    options = read_options(__doc__, "artifact", rounds=20)
    runner = ModelRunner(Artifact.open(options.artifact, check_weights=False), num_pages=1)
    logits = runner.forward(_batch())
    num_tokens = logits.shape[1]
    print(f"{num_tokens:,} tokens; ms a row: steep, flat")
    chance = np.random.default_rng(0)
    kinds = {
        "steep": -1.5 * np.log(chance.permuted(np.tile(np.arange(1, num_tokens + 1), (ROWS, 1)), axis=1)),
        "flat": chance.normal(size=(ROWS, num_tokens)) * 3,
    }
    prompt = chance.integers(0, num_tokens, 2000).tolist()
    for name, params in WAYS.items():
        figures = []
        for kind in kinds.values():
            logits[:] = kind
            top = runner.top_logits(ROWS, num_tokens)
            states = [SamplerState(params, prompt, num_tokens) for _ in range(ROWS)]

            def choose() -> None:
                step = StepLogits(logits, top)  # noqa: B023
                for row, state in enumerate(states):  # noqa: B023
                    sample_row(step, row, state)

            figures.append(f"{best_s(choose, options.rounds) / ROWS * 1e3:.3f}")
        print(f"{name:34}{', '.join(figures)}", flush=True)
    runner.close()


def _batch() -> Batch:
    """Return a batch of `ROWS` tokens of one sequence, with all logits."""
    rows = np.arange(ROWS, dtype=np.int32)
    return Batch(
        token_ids=rows,
        positions=rows,
        slots=rows,
        row_of_token=np.zeros(ROWS, np.int32),
        page_table=np.zeros((1, 1), np.int32),
        kv_lengths=rows + np.int32(1),
        logit_rows=rows,
    )


if __name__ == "__main__":
    main()
