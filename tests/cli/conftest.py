"""A fake engine in place of the real one, for what the terminal shows is not the model's doing."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import ClassVar, Self

import pytest
from click.testing import CliRunner
from radixlm.runtime.artifact import CHAT_TEMPLATE
from radixlm.runtime.engine.completion import CacheMatch, Completion, Delta, Timings, Usage
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import ArtifactNotFound, ContextLengthExceeded


class FakeStream:
    """Says `words`; one that is None is the user's Ctrl-C."""

    def __init__(self, words: list[str | None], num_prompt: int, num_cached: int) -> None:
        self._words = words
        self._usage = Usage(num_prompt, len(words), num_cached)
        self._said: list[str] = []
        self._cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        for word in self._words:
            if word is None:
                signal.raise_signal(signal.SIGINT)
                assert self._cancelled
                return
            self._said.append(word)
            yield Delta(word, (0,))

    def cancel(self) -> None:
        self._cancelled = True

    def result(self) -> Completion:
        reason = "cancelled" if self._cancelled else "stop"
        timings = Timings(0.125, 80.0, 0.5)
        match = CacheMatch(None, 0, None)
        return Completion("".join(self._said), (0,), (0,), None, reason, self._usage, timings, match)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FakeEngine:
    """Remembers how it was opened and asked; replies from a script that tests change."""

    words: ClassVar[list[str | None]] = ["Hello", " there"]
    chat_template: ClassVar[object] = "a template"
    opened: ClassVar[list[Mapping[str, object]]]
    asked: ClassVar[list[tuple[object, SamplingParams]]]

    def __init__(self, model: object, **options: object) -> None:
        if not str(model).endswith(".radixlm"):
            raise ArtifactNotFound(f"there is no artifact at {model}; make one with: radixlm compile")
        self.opened.append(options)
        self.default_params = SamplingParams(temperature=0.2)
        self.prompts = SimpleNamespace(chat_template=self.chat_template)

    def stream(self, prompt: object, params: SamplingParams) -> FakeStream:
        self.asked.append((prompt, params))
        return FakeStream(self.words, 3, 0)

    def stream_chat(self, messages: Sequence[Mapping[str, object]], params: SamplingParams) -> FakeStream:
        if messages[-1]["content"] == "too long":
            raise ContextLengthExceeded("the prompt has 9999 tokens, the context 2048; send a shorter one")
        self.asked.append((list(messages), params))
        return FakeStream(self.words, 10 * len(messages), 10 * (len(messages) - 2))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """The class that commands open; what it is asked is remembered on it."""

    class Fresh(FakeEngine):
        opened: ClassVar[list[Mapping[str, object]]] = []
        asked: ClassVar[list[tuple[object, SamplingParams]]] = []

    def read_manifest(artifact: Path) -> SimpleNamespace:
        return SimpleNamespace(files={} if Fresh.chat_template is None else {CHAT_TEMPLATE: None})

    monkeypatch.setattr("radixlm.runtime.engine.engine.Engine", Fresh)
    monkeypatch.setattr("radixlm.cli.cached_artifact.read_manifest", read_manifest)
    return Fresh


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()
