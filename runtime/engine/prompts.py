"""The text side of a model: the prompts of texts, ids and conversations, and the readers of replies.

Knows one model's tokenizer, chat template and grammars; not requests, pages or the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

from ..artifact import Artifact
from ..cache.why_not_more import WhyNotMore
from ..chat.artifact_tokenizer import checked_ids, open_tokenizer, refusing, with_ends
from ..chat.chat_template import ChatTemplate
from ..chat.conversations import Conversations
from ..chat.grammar import Grammar
from ..chat.reasoning import Reasoning
from ..chat.reply_start import HealingTokens, SpaceTokens
from ..chat.text_rules.text_search import TokenTexts
from ..chat.token_constraint import ConstraintSource, TokenConstraint
from ..chat.tools.call_history import CallHistory
from ..chat.tools.known_formats import PLAIN, format_of
from ..chat.tools.tool_format import Tool, ToolFormat
from ..errors import EmptyPrompt, InvalidParameter, InvalidRequest
from ..memory import ForgetResult, Memory
from .reply import Reply
from .request_options import Message, Prompt
from .sampling_params import SamplingParams
from .step.sampler_state import NO_IDS

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

SuffixPolicy = Literal["text", "always", "never"]
"""Prompts that lose the token of a lone space at their end: chats and texts; token ids, too; or none."""


class PromptTexts(Memory):
    """The texts remembered apart from pages: encodings that later prompts continue, and the calls of replies."""

    def __init__(self, tokenizer: Tokenizer, call_history: CallHistory) -> None:
        self._tokenizer, self._call_history = tokenizer, call_history

    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget a namespace's texts and calls."""
        self._tokenizer.forget_texts(namespace)
        self._call_history.forget(namespace)
        return ForgetResult()

    def drop_unused(self, since: float) -> None:
        """Forget texts and calls that were last used before `since`."""
        self._tokenizer.forget_unused_texts(since)
        self._call_history.forget_unused(since)


class Prompts:
    """The prompts of one artifact, and the readers of their replies; for any thread.

    In a namespace given as `seam_of`, a prompt that continues an earlier text is encoded only from there.

    Args:
        clock: seconds; only differences count.
        strip_suffix: prompts that lose the token of a lone space at their end.
        template_kwargs: default variables of the chat template; a conversation can override them.

    Attributes:
        vocab_size: number of tokens that both the tokenizer and the model know.
        chat_template: None if the artifact has none.
        call_history: the tool calls of replies.
        texts: remembered prompts and calls.
        reasoning: the reasoning format of the model, and how much of it the prompts of later turns keep.

    Raises:
        CorruptArtifact: the tokenizer cannot be used.
        InvalidParameter: there is no such `strip_suffix`.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        clock: Callable[[], float],
        strip_suffix: SuffixPolicy = "text",
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        if strip_suffix not in get_args(SuffixPolicy):
            allowed = ", ".join(get_args(SuffixPolicy))
            raise InvalidParameter(f"strip_suffix is {strip_suffix!r}; use one of {allowed}")
        manifest = artifact.manifest
        self._strip_suffix = strip_suffix
        self._name, self._eos_token_ids = manifest.name, manifest.tokenizer.eos_token_ids
        template: ChatTemplate | None = None
        fault: str | None = None
        try:
            template = None if artifact.chat_template is None else ChatTemplate(artifact.chat_template)
        except InvalidRequest as error:
            fault = str(error)
        self.tokenizer = open_tokenizer(artifact, template, clock)
        self.chat_template = None if template is None else with_ends(template, artifact, self.tokenizer)
        self.vocab_size = min(manifest.model.vocab_size, self.tokenizer.vocab_size)  # embeddings may be padded
        self.reasoning = Reasoning(self.chat_template, self.tokenizer, self.vocab_size)
        self._conversations = Conversations(
            self._name,
            self.chat_template,
            fault,
            self.reasoning,
            tool_format=lambda: self.tool_format,
            template_kwargs=template_kwargs or {},
        )
        self.call_history = CallHistory(clock=clock)
        self.texts = PromptTexts(self.tokenizer, self.call_history)
        self._space_tokens = SpaceTokens(self.tokenizer, self.vocab_size)
        self._healing_tokens = HealingTokens(self.tokenizer, self.vocab_size)
        self._token_texts = TokenTexts(self.tokenizer, self.vocab_size)
        self._grammars: Grammars | None = None
        self._opening_grammars = threading.Lock()

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes tool calls."""
        if self.chat_template is None:
            return PLAIN
        format = format_of(self.chat_template)
        ids = self.tokenizer.special_ids_in(format.texts)
        return format.of_model({self.tokenizer.decode([each], skip_special=False): each for each in ids})

    @cached_property
    def _shown_ids(self) -> frozenset[int]:
        """Ids of special tokens that the decoder of a chat's reply spells out, so that the reply is split at them."""
        return self.reasoning.shown_ids | {token_id for _, token_id in self.tool_format.specials}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""
        return tuple(self._eos_token_ids)

    @cached_property
    def turn_ends(self) -> tuple[str, ...]:
        """The texts of the tokens that end a reply."""
        return tuple(self.decode([token_id]) for token_id in self._eos_token_ids)

    def completion(
        self,
        prompt: Prompt,
        *,
        seam_of: bytes | None = None,
        context_length: int | None = None,
        strip_suffix: bool | None = None,
        heals: bool = False,
    ) -> PreparedPrompt:
        """Prepare a raw prompt: as it is, except for the token of a lone space at its end.

        An empty text is a prompt if the tokenizer begins a text with a token of its own.

        Args:
            seam_of: namespace of earlier texts; a prompt that continues one of them is encoded only from there, with
                the same ids. None: it is encoded whole.
            context_length: the most tokens; None: any number.
            strip_suffix: drop the token of a lone space. None: as the engine's option says for text, or for ids.
            heals: drop the last token, whatever it is, if it is text and not the only one. `strip_suffix` is then
                ignored.

        Raises:
            EmptyPrompt: there are no tokens.
            ContextLengthExceeded: it has more tokens than `context_length`. One that is far too long is not encoded.
            InvalidRequest: the text cannot be encoded, or the ids are invalid.
        """
        if not isinstance(prompt, str):
            prompt = checked_ids(prompt, context_length)
        if heals:
            strip_suffix = False
        if strip_suffix is None:
            strip_suffix = self._strip_suffix == "always" or (self._strip_suffix == "text" and isinstance(prompt, str))
        with refusing():
            prepared = self.tokenizer.prepare_completion(
                prompt, seam_of=seam_of, max_tokens=context_length, strips_suffix=strip_suffix
            )
        if not prepared.ids:
            raise EmptyPrompt("the prompt is empty, and the tokenizer adds no token of its own; send some text")
        if heals and len(prepared.ids) > 1 and self._healing_tokens.can_heal(prepared.ids[-1]):
            return prepared.without_last(self.tokenizer.token_bytes(prepared.ids[-1]))
        return prepared

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, object] | None = None,
        *,
        seam_of: bytes | None = None,
        context_length: int | None = None,
        remembers: bool = True,
    ) -> PreparedPrompt:
        """Prepare a conversation and the generation prompt.

        Args:
            seam_of, context_length: as in `completion`.
            remembers: prompts that continue this one can reuse its encoding.

        Raises:
            ContextLengthExceeded: as `completion`.
            EmptyPrompt, InvalidRequest: as `render`, or the text cannot be encoded.
        """
        values: Sequence[Any] = [*self._conversations.values(messages, tools, template_kwargs)]
        with refusing():  # control tokens in a client's text are text
            rendered, has_marks = self.tokenizer.render_typed(values, lambda told: self._conversations.rendered(*told))
        with refusing():
            return self.tokenizer.prepare_chat(
                rendered,
                seam_of=seam_of,
                has_marks=has_marks,
                max_tokens=context_length,
                strips_suffix=self._strip_suffix != "never",
                remembers=remembers,
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of a conversation and the generation prompt.

        Raises:
            EmptyPrompt: there are no messages.
            InvalidRequest: the artifact has no usable chat template, or the template refuses the messages.
        """
        return self._conversations.rendered(*self._conversations.values(messages, tools, template_kwargs))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the ids of a text, its suffix included; `add_bos` overrides the model's default.

        Raises:
            InvalidRequest: the text cannot be encoded.
        """
        with refusing():
            return self.tokenizer.encode(text, add_bos=add_bos, parse_special=True)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation; see `chat`."""
        return list(self.chat(messages, tools, template_kwargs).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        with refusing():
            return self.tokenizer.decode(token_ids, skip_special=False)

    @property
    def grammars(self) -> Grammars:
        """The compiler of grammars for replies; it is loaded at the first use.

        Raises:
            InvalidRequest: the model has no token that ends a reply.
        """
        with self._opening_grammars:
            if self._grammars is None:
                from ..chat.grammar_vocabulary import open_grammars  # loads a native library

                if not self._eos_token_ids:
                    raise InvalidRequest(f"model {self._name} has no end of replies, so none can be structured")
                self._grammars = open_grammars(self.tokenizer, self.vocab_size, self._eos_token_ids)
            return self._grammars

    def reply(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        constraint: Grammar | ConstraintSource | None,
        *,
        is_chat: bool = False,
    ) -> Reply:
        """Make the reply to a prompt, without tokens yet. A chat's reply can begin with reasoning.

        Raises:
            InvalidGrammar: the constraint is an invalid grammar.
            InvalidRequest: the constraint is a grammar, and the model has no token that ends a reply.
        """
        if isinstance(constraint, Grammar):
            constraint = self.grammars.compile(constraint)
        if params.needs_token_texts:
            self._token_texts.prepare()
        begun: TokenConstraint | None = None
        if prompt.space_id is not None:
            begun = self._space_tokens.start(params.end_ids(self._eos_token_ids))
        if prompt.healed:
            begun = self._healing_tokens.start(prompt.healed, params.end_ids(self._eos_token_ids))
        text = (prompt.text or "") if is_chat else ""
        decoder = partial(
            self.tokenizer.stream,
            prompt_ids=prompt.ids,
            swallow_leading_space=prompt.swallow_leading_space,
            healed=prompt.healed,
            shown_ids=self._shown_ids if is_chat else frozenset(),
        )
        if constraint is not None and (not is_chat or getattr(constraint, "holds_reasoning", False)):
            begun = constraint.start()
        elif constraint is not None:
            begun = self.reasoning.before(constraint, text, decoder=decoder)
        breakers = tuple(params.dry_sequence_breakers) if params.dry_multiplier else ()
        return Reply(
            params,
            prompt.ids,
            decoder=decoder(),
            vocab_size=self.vocab_size,
            eos_token_ids=self._eos_token_ids,
            constraint=begun,
            thoughts=self.reasoning.splitter(text, self.tool_format.head_in) if is_chat else None,
            holding=self._token_texts.holding,
            breaker_ids=self._token_texts.holding_any(breakers) if breakers else NO_IDS,
        )

    def close(self) -> None:
        """Free the grammar compiler. Can be called twice."""
        if self._grammars is not None:
            self._grammars.close()

    def explain(self, why: WhyNotMore) -> WhyNotMore:
        """Return a copy with the texts of its ids."""
        return why.spelled(self.tokenizer.token_bytes, self.tokenizer.profile.special_ids)
