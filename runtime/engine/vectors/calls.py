"""The calls that ask an engine for embeddings of texts, and for scores of documents.

Knows arguments, and how results are made from completions. The engine computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast, overload

from ...artifact.manifest import Manifest
from ...errors import InvalidArgument
from ..calls.arguments import are_prompts
from ..calls.batch import naming, results
from ..completion import Completion
from ..generation_stream import GenerationStream, StartRequest
from ..request import Request
from ..request_maker import RequestMaker
from ..request_options import NO_OPTIONS, Prompt, RequestOptions
from .hidden_states import HiddenStateReader
from .prompts import VectorPrompts
from .results import DocumentScore, Embedding, best_first, embedding_of, require_dimensions, score_of


class VectorCalls(ABC):
    """The calls of an engine that return embeddings and scores; the engine makes and starts the requests."""

    manifest: Manifest
    vector_prompts: VectorPrompts
    _requests: RequestMaker
    _num_at_once: int  # texts that are in the engine at once

    @abstractmethod
    def _require_usable(self) -> None:
        """Raise EngineError if no request can be made."""

    @abstractmethod
    def _start(self, request: Request, on_ready: Callable[[], None] | None) -> GenerationStream:
        """Hand a request to the engine."""

    @overload
    def embed(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        text: Prompt,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> Embedding: ...

    @overload
    def embed(
        self,
        text: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[Embedding]: ...

    def embed(
        self,
        text: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> Embedding | list[Embedding]:
        """Return the embedding of a text, or of each text of a list. It has the same bits in any batch.

        Args:
            text: as text, or as token ids, which are taken as they are.
            dimensions: numbers of a vector; the first ones are kept (Matryoshka). None: all.
            prompt_name: name of a prompt of the model's that is put before the texts, such as `query`.

        Raises:
            InvalidRequest: the model makes no embeddings, or a text cannot be encoded.
            InvalidParameter: it has no such prompt, or too few dimensions.
            EmptyPrompt, ContextLengthExceeded: of a text; the message has its index among several.
            EngineError: it could not be computed, or the engine is closed or belongs to another process.
        """
        texts = text if are_prompts(text) else [cast("Prompt", text)]
        info = self.vector_prompts.embedding
        require_dimensions(dimensions, self.manifest.model.num_outputs)
        ask = partial(self.stream_embedding, prompt_name=prompt_name, options=options)
        vectors = [embedding_of(each, info, dimensions) for each in self._completions(texts, ask)]
        return vectors if are_prompts(text) else vectors[0]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[DocumentScore]:
        """Return the score of each document for a query, the best first.

        The instruction and the query are computed once: documents find them in the prefix cache. A reranker with a head
        reads the query with each document, and takes no instruction.

        Args:
            top_n: the most documents; None: all.
            instruction: describes relevant documents; None: the model's default.

        Raises:
            InvalidRequest: the model is no reranker, or a text cannot be encoded.
            InvalidParameter: the model takes no instruction.
            ContextLengthExceeded: of a document; the message has its index.
            EngineError: as `embed`.
        """
        if isinstance(documents, str):
            raise InvalidArgument("documents is a text; it must be a list of texts", param="documents")
        ask = partial(self.stream_score, query, instruction=instruction, options=options)
        completions = self._completions(documents, ask)
        return best_first((score_of(each, index) for index, each in enumerate(completions)), top_n)

    def stream_embedding(
        self,
        text: Prompt,
        *,
        prompt_name: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Start computing a text; `embedding_of` makes its embedding from the completion.

        `on_ready` is called in the engine's thread after each output of the stream.
        """
        self._require_usable()
        pooling = self.vector_prompts.embedding.pooling
        request = self._requests.reading(
            lambda: self.vector_prompts.text(text, prompt_name),
            lambda prompt: HiddenStateReader(pooling, len(prompt.ids)),
            options,
        )
        return self._start(request, on_ready)

    def stream_score(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Start computing a query with a document; `score_of` makes its score from the completion.

        `on_ready` is called in the engine's thread after each output of the stream.
        """
        self._require_usable()
        reranker = self.vector_prompts.reranker
        request = self._requests.reading(
            lambda: self.vector_prompts.pair(query, document, instruction),
            lambda prompt: reranker.reader(len(prompt.ids)),
            options,
        )
        return self._start(request, on_ready)

    def _completions(self, texts: Iterable[Prompt], ask: Callable[..., GenerationStream]) -> list[Completion]:
        """Return the completion of each text, in order; if one fails, the others are cancelled."""
        self._require_usable()
        found: dict[int, Completion] = {}
        for result in results(texts, lambda text: cast("StartRequest", partial(ask, text)), self._num_at_once):
            if result.error is not None:
                with naming(result.index):
                    raise result.error
            assert result.completion is not None
            found[result.index] = result.completion
        return [found[index] for index in range(len(found))]
