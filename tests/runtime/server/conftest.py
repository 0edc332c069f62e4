"""A fake engine: it answers with the words of its script, from a thread of its own, as the real one does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, ModelIdentity
from radixlm.runtime.cache.cache_tree import CacheCleared, CachedText, CacheTree, TreeRun
from radixlm.runtime.cache.cache_uses import CacheUse
from radixlm.runtime.cache.why_not_more import MatchPolicy, WhyNotMore
from radixlm.runtime.chat.tools.known_formats import PLAIN
from radixlm.runtime.chat.tools.tool_format import ToolFormat
from radixlm.runtime.engine.completion import (
    CacheMatch,
    Completion,
    Delta,
    FinishReason,
    PrefillProgress,
    Timings,
    TokenLogprob,
    Usage,
)
from radixlm.runtime.engine.engine import EngineStats, GenerationStream
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EmptyPrompt, EngineOverloaded, InvalidRequest, RadixLMError
from radixlm.runtime.memory import Memory
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

STATS = EngineStats(
    alive=True,
    stalled_s=0.0,
    uptime_s=1.0,
    **{name: 0 for name in EngineStats.__dataclass_fields__ if name.startswith("num_")},
)


WHY = WhyNotMore("retokenized", 2, (0, 1), (2,), True, cached_text="Hello wörld", wanted_text="!")
TREE = CacheTree(
    *(3, 70, 5, 2, 1),
    runs=(
        TreeRun(None, 0, 48, 16, 3, 1, 12.3456, (0, 1), 2, node_id=7),
        TreeRun(0, 48, 16, 0, 1, 0, 0.5, (1,), 0, node_id=8),
    ),
    is_whole=False,
    is_counted=True,
    uses=(
        CacheUse("request-7", "running", 64, {"exact": 48}, 0, 98.0, None, None, None, None, run=1),
        CacheUse("request-3", "ended", 50, {}, 9, 90.0, 95.5, "stop", WHY, None),
    ),
    now=100.0,
)


class FakeStream(GenerationStream):
    """The engine's words, one delta each; the last one says why it ends."""

    def __init__(
        self,
        engine: FakeEngine,
        params: SamplingParams,
        on_ready: Callable[[], None] | None,
        *,
        with_progress: bool = False,
    ) -> None:
        self.prompt_token_ids, self.progress = (1, 2, 3), None
        self.cancelled = threading.Event()
        self._engine = engine
        self._params = params
        self._words = engine.words[: params.max_tokens]
        self._on_ready = on_ready or (lambda: None)
        self._deltas: deque[Delta | RadixLMError] = deque()
        self._ended = False
        self._sent: list[Delta] = []
        if params.max_tokens == 0:
            self._deltas.append(Delta("", (), finish_reason="length"))
        if with_progress:
            self._deltas += [Delta("", (), progress=PrefillProgress(3, 2, there, 0.0)) for there in (2, 3)]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for number, word in enumerate(self._words):
            while number >= self._engine.num_free_words and not self._engine.go_on.wait(0.01):
                if self.cancelled.is_set():
                    break
            if self.cancelled.is_set():
                self._put(Delta("", (), finish_reason="cancelled"))
                return
            if isinstance(word, RadixLMError):
                self._put(word)
                return
            last = number == len(self._words) - 1
            asked = self._params.logprobs is not None
            top = tuple(self._engine.top_logprobs) or ((number, -0.5),)
            logprobs = (TokenLogprob(number, -0.5, top),) if asked else None
            self._put(Delta(word, (number,), logprobs, self._finish_reason() if last else None))

    def _finish_reason(self) -> FinishReason:
        max_tokens = self._params.max_tokens
        return "stop" if max_tokens is None or max_tokens > len(self._engine.words) else "length"

    def _put(self, item: Delta | RadixLMError) -> None:
        self._deltas.append(item)
        self._on_ready()

    def poll(self) -> Delta | None:
        if self._ended:
            raise StopIteration
        if not self._deltas:
            return None
        item = self._deltas.popleft()
        if isinstance(item, RadixLMError):
            self._ended = True
            raise item
        self._sent.append(item)
        self._ended = item.finish_reason is not None
        return item

    def cancel(self) -> None:
        self.cancelled.set()

    def result(self) -> Completion:
        assert self._ended
        logprobs = tuple(p for d in self._sent for p in d.logprobs or ())
        return Completion(
            text="".join(d.text for d in self._sent),
            token_ids=tuple(i for d in self._sent for i in d.token_ids),
            prompt_token_ids=(1, 2, 3),
            logprobs=logprobs if self._params.logprobs is not None else None,
            finish_reason=self._sent[-1].finish_reason or "stop",
            usage=Usage(3, sum(len(d.token_ids) for d in self._sent), 2, {"exact": 2}),
            timings=Timings(0.1, 10.0, 0.2, 0.05),
            cache_match=CacheMatch("exact", 2, self._engine.why_not_more),
        )


@dataclass
class FakeEngine:
    """What the server needs of an engine, and what it was asked."""

    words: list[str | RadixLMError] = field(default_factory=lambda: ["Hello", " wörld", "!"])
    go_on: threading.Event = field(default_factory=threading.Event)  # words come only while it is set,
    num_free_words: int = 0  # but for the first ones
    asked: list[tuple[object, SamplingParams]] = field(default_factory=list)
    namespaces_asked: list[bytes] = field(default_factory=list)
    matches_asked: list[str | None] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    namespaces_cleared: list[bytes] = field(default_factory=list)
    why_not_more: WhyNotMore | None = WHY
    namespaces: CacheNamespaces = field(default_factory=lambda: CacheNamespaces(ModelIdentity(), b"secret"))
    streams: list[FakeStream] = field(default_factory=list)
    engine_stats: EngineStats = STATS
    bytes_of_tokens: list[bytes] = field(default_factory=list)  # where they are not whole words
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)  # none: the word itself
    default_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.3))
    context_length: int = 512
    match: MatchPolicy = "text"
    max_num_requests: int | None = None
    room: int | None = None
    manifest: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            name="fake",
            digest=64 * "0",
            target=SimpleNamespace(numeric_class="fma"),
            embedding=None,
            reranking=None,
            writes_text=True,
        )
    )
    reply_options: dict[str, object] = field(default_factory=dict)
    tool_format: ToolFormat = PLAIN
    num_grammars_expected: int = 0
    prompts: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            chat_template=SimpleNamespace(source="{{ messages }}"), reasoning=SimpleNamespace(format=None)
        )
    )
    store_directory: Path | None = None
    adapters: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(names=()))
    memories: list[Memory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go_on.set()

    @property
    def vector_prompts(self) -> NoReturn:
        raise InvalidRequest("model fake makes no embeddings")

    def remember(self, memory: Memory) -> None:
        self.memories.append(memory)

    def expect_grammars(self) -> None:
        self.num_grammars_expected += 1

    def note_call(self, call: object, options: RequestOptions, stream: object) -> None:
        """It remembers no calls,"""

    def as_generated(self, messages: Sequence[object], options: RequestOptions) -> Sequence[object]:
        """so that they stay as they came."""
        return messages

    @property
    def queue(self) -> FakeEngine:
        return self

    @property
    def tokenizer(self) -> SimpleNamespace:
        def token_bytes(token_id: int) -> bytes:
            return self.bytes_of_tokens[token_id] if self.bytes_of_tokens else str(self.words[token_id]).encode()

        def decode(ids: Sequence[int], skip_special: bool) -> str:
            return b"".join(map(token_bytes, ids)).decode(errors="replace")

        return SimpleNamespace(decode=decode, token_bytes=token_bytes)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams,
        *,
        options: RequestOptions,
        on_ready: Callable[[], None] | None = None,
    ) -> FakeStream:
        return self.stream(messages, params, options=options, on_ready=on_ready)

    def stream(
        self,
        prompt: object,
        params: SamplingParams,
        *,
        options: RequestOptions,
        on_ready: Callable[[], None] | None = None,
    ) -> FakeStream:
        if not prompt:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        self.namespaces_asked.append(options.namespace)
        self.matches_asked.append(options.cache_match)
        self.options.append(options)
        self.asked.append((prompt, params))
        self.streams.append(FakeStream(self, params, on_ready, with_progress=options.with_progress))
        return self.streams[-1]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [*([] if add_bos is False else [0]), *range(1, 1 + len(text.split()))]

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: object = (), template_kwargs: object = None
    ) -> list[int]:
        return list(range(len(messages)))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(str(self.words[token_id]) for token_id in token_ids)

    def refusal(self, num_waiting: int) -> EngineOverloaded:
        return EngineOverloaded(num_waiting, self.max_num_requests or 0, 1)

    def stats(self) -> EngineStats:
        return self.engine_stats

    def cache_tree(self, namespace: bytes) -> CacheTree:
        self.namespaces_asked.append(namespace)
        return TREE

    def cached_text(self, namespace: bytes, node_id: int) -> CachedText | None:
        return CachedText(48, (1, 0, 1)) if node_id == 8 else None

    def clear_cache(self, namespace: bytes) -> CacheCleared:
        self.namespaces_cleared.append(namespace)
        for memory in self.memories:
            for done in memory.forget(namespace).pending:
                done.result()
        return CacheCleared(3, 2)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    app = create_app(engine, max_body_bytes=10_000)  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
