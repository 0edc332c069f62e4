"""What was asked of the engine: one request, before anything of it is done.

Knows no sequence, pages or steps.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cache.reply_alias import ReplyAlias
from ..cache.why_not_more import WhyNotMore
from ..prefix.expected_prompts import ExpectedPrompt
from .reply import Reply
from .request_options import NO_OPTIONS, RequestOptions
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from radixlm.tokenizer_fix import PreparedPrompt, SpelledPrompt


@dataclass(frozen=True)
class RequestSpec:
    """What was asked, in the engine's terms: nothing of it changes while the request is served."""

    request_id: str  # the engine's own
    prompt: PreparedPrompt
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    arrived_at: float = 0.0  # seconds on the engine's clock
    spelled: Callable[[], SpelledPrompt] | None = None  # what the prompt spells, if it may be matched by text
    renderings: Callable[[str, str], collections.abc.Sequence[str]] | None = None  # of a reply, later, and its thought
    expects: Callable[[str, str], ExpectedPrompt] | None = None  # the prompt after a reply and its thought, if known
    explain: Callable[[WhyNotMore], WhyNotMore] = lambda why: why  # adds the texts of its ids

    @property
    def name(self) -> str:
        """The caller's own name of the request, or the engine's."""
        return self.options.request_id or self.request_id

    @property
    def namespace(self) -> bytes | None:
        """Whose cache the request uses; None: it reuses nothing, and nothing is kept of it."""
        return None if self.options.cache_match == "off" else self.options.namespace

    def aliases(self, reply: Reply) -> list[ReplyAlias]:
        """A finished reply and how it may be rendered, where that is another text."""
        renderings = self.renderings
        if renderings is None or reply.is_cut or not reply.token_ids:
            return []
        ids = tuple(reply.ids_without_end)
        text = self._spelled(ids) if reply.num_thought_tokens else reply.text
        if text is None or not self._spells(ids, text):
            return []
        found = (ReplyAlias.of(ids, text, each) for each in renderings(reply.text, reply.thought))
        return [alias for alias in found if alias is not None]

    def _spells(self, ids: Iterable[int], text: str) -> bool:
        """Whether ids are `text` but for white space around it: special tokens and half characters are not in it."""
        spelled = self._spelled(ids)
        return spelled is not None and spelled.strip() == text.strip()

    def _spelled(self, ids: Iterable[int]) -> str | None:
        """The text of ids; None: there are special tokens or half characters in it, or it is not asked for."""
        if self.spelled is None:
            return None
        try:
            return b"".join(map(self.spelled().spell, ids)).decode()
        except UnicodeDecodeError:
            return None
