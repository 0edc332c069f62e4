"""Measure the loss as memory keeps less of each probe key, from all of it down to a hundredth of keys and values.

    python -m bench.partial.probe_sizes ARTIFACT [--head 2]

The questions are those of `radixlm calibrate`, over a quarter of the rows: facts, and how a text continues. A row of
the table keeps a number of a key's dimensions, those that RoPE rotates slowest, in four bits each; `keys` is their
share of keys and values, `all` with orders and checksums. The head is that of the artifact's calibration unless it is
given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.model_config import Attention
from radixlm.runtime.chat.artifact_tokenizer import open_tokenizer
from radixlm.runtime.extras.approximate.calibration.calibrate import (
    HEAD_BUDGET,
    Loss,
    measured_model,
    pages_needed,
    questions_of,
)
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration
from radixlm.runtime.extras.approximate.calibration.measured_prefix import cases, shipped_text
from radixlm.runtime.extras.approximate.packed_keys import ORDER_BYTES, PART_BYTES, slowest
from radixlm.runtime.model.model_runner import ModelRunner

from ..options import read_options

SHARES = (1.0, 0.75, 0.5625, 0.5, 0.375, 0.25, 0.125)  # of the dimensions of a key


def main() -> None:
    """Print the KL of partly read prefixes by how many dimensions of each probe key memory keeps."""
    options = read_options(__doc__, "artifact", head=int)
    artifact = Artifact.open(options.artifact)
    manifest = artifact.manifest
    kv = manifest.kv
    head = Calibration.read(artifact.path, manifest).probe_head if options.head is None else options.head
    tokenizer = open_tokenizer(artifact, None, time.monotonic)
    first_ids, context = tokenizer.encode(""), manifest.context_length
    asked = cases(shipped_text(), tokenizer.encode_inside, first_ids=first_ids, context_length=context)
    each = [layer if isinstance(layer, Attention) else None for layer in manifest.model.attentions]
    rotary = [layer.rope.rotary_dim if layer is not None and layer.rope else 0 for layer in each]
    dims = {count: slowest(rotary, kv.head_dim, count) for count in (int(kv.head_dim * share) for share in SHARES)}
    losses: dict[int, list[Loss]] = {count: [] for count in dims}
    with closing(ModelRunner(artifact, num_pages=pages_needed(asked), keep_scores=True)) as runner:
        model = measured_model(artifact, runner, asked)
        for case in asked:
            for question in questions_of(model, case):
                for count, kept in dims.items():
                    losses[count].append(question.loss(HEAD_BUDGET, head, kept))
    token_bytes = kv.page_bytes / kv.page_size
    table_bytes = kv.num_layers * (ORDER_BYTES * kv.num_kv_heads + PART_BYTES)
    print("| numbers | keys | all | KL, facts | KL, text | facts found | dropped, estimated |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for count, some in losses.items():
        key_bytes = kv.num_layers * (count / 2 + 2)
        shares = f"{key_bytes / token_bytes:.1%} | {(key_bytes + table_bytes) / token_bytes:.1%}"
        print(f"| {count} | {shares} | {summary(some)} |")


def summary(losses: Sequence[Loss]) -> str:
    """Return the last columns of a table's row; losses are of facts and of text, alternately."""
    facts, text = (float(np.mean([loss.kl for loss in some])) for some in (losses[::2], losses[1::2]))
    found = sum(loss.is_found and loss.is_found_whole for loss in losses)
    num_facts, estimate = sum(loss.is_found_whole for loss in losses), np.mean([loss.dropped for loss in losses])
    return f"{facts:.3f} | {text:.3f} | {found} of {num_facts} | {estimate:.3f}"


if __name__ == "__main__":
    main()
