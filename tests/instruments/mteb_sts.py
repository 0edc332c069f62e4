"""Score a served embedding model with mteb, on sentence pairs in this file.

    python -m venv /tmp/mteb && /tmp/mteb/bin/pip install mteb openai
    radixlm serve EMBEDDING_MODEL
    /tmp/mteb/bin/python tests/instruments/mteb_sts.py http://127.0.0.1:8000/v1 [MODEL]

The data of mteb's own tasks is on a hub, so this task has 12 pairs of its own: enough to see that vectors arrive and
mean something. `make test-instruments` does not run it, because mteb needs torch.
"""

from __future__ import annotations

import sys
from typing import Any

import mteb
import numpy as np
import openai
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder

PAIRS = (
    ("A man is playing a guitar.", "A man plays the guitar.", 5.0),
    ("A woman is slicing an onion.", "A woman cuts an onion.", 4.6),
    ("Two dogs run through the snow.", "Two dogs are running in snow.", 4.8),
    ("The cat sleeps on the sofa.", "A cat is lying on a couch.", 4.2),
    ("Oil prices rose on Monday.", "The price of oil went up.", 3.8),
    ("A plane is taking off.", "A plane is landing.", 2.4),
    ("A child rides a bicycle.", "A boy is on a horse.", 1.8),
    ("The river flows to the sea.", "The lake is frozen in winter.", 1.6),
    ("A chef is cooking soup.", "A musician tunes her violin.", 0.6),
    ("The court rejected the appeal.", "Bananas are rich in potassium.", 0.0),
    ("She reads a book in the park.", "The engine of the truck failed.", 0.2),
    ("Trees lose their leaves in autumn.", "The stock market closed early.", 0.0),
)


class LocalPairs(AbsTaskSTS):
    """`PAIRS` as a task of semantic textual similarity."""

    metadata = TaskMetadata(
        name="LocalPairs",
        dataset={"path": "local/pairs", "revision": "1"},
        description="Sentence pairs with a similarity from 0 to 5.",
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, **kwargs: Any) -> None:
        """Load the pairs of this file."""
        first, second, scores = zip(*PAIRS, strict=True)
        columns = {"sentence1": [*first], "sentence2": [*second], "score": [*scores]}
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


class Served(AbsEncoder):
    """A model behind `/v1/embeddings`, called with OpenAI's client."""

    def __init__(self, base_url: str, model: str) -> None:
        self.mteb_model_meta = ModelMeta.create_empty(overwrites={"name": f"served/{model}", "revision": "1"})
        self._client = openai.OpenAI(base_url=base_url, api_key="none")
        self._model = model

    def encode(self, inputs: Any, **kwargs: Any) -> np.ndarray:
        """Return the vectors of all texts. Sends one request per batch."""
        batches = [self._client.embeddings.create(model=self._model, input=batch["text"]).data for batch in inputs]
        return np.array([each.embedding for batch in batches for each in batch])


def main(base_url: str, model: str | None = None) -> None:
    """Evaluate the model and print its scores."""
    name = model or openai.OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    [result] = mteb.evaluate(Served(base_url, name), LocalPairs(), cache=None).task_results
    [scores] = result.scores["test"]
    for metric in ("cosine_spearman", "cosine_pearson"):
        print(f"{name}: {metric} {scores[metric]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
