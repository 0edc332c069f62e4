"""How a reply's tokens are chosen and when the reply ends: the client's wishes, validated.

Knows ranges, not logits; `sampler.py` does what is wished here. What depends on the model (is this token id
in the vocabulary) is checked by `EngineCore.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ..artifact.manifest import SamplingDefaults
from ..chat.text_rules.pattern import automaton_of
from ..errors import InvalidParameter

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17  # numbers of a request: tokens of its prompts times one and `prompt_logprobs`
MAX_REPLY_LOGPROBS = 1 << 19  # likewise, of a request for several replies: some 170 MB as JSON
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_BANNED_STRINGS = 512
MAX_BANNED_LENGTH = 256  # characters
MAX_BANNED_CHARACTERS = 16384  # of all of them


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Field names and meanings are those of OpenAI's and vLLM's APIs.

    A field that is not given does nothing. The model's own defaults are `Engine.default_params`;
    `dataclasses.replace(engine.default_params, temperature=0.7)` keeps the others.

    The order is: repetition, presence and frequency penalty, logit bias, temperature, then top-k, top-p and
    min-p, each on what the one before it left. `temperature=0` takes the most likely token, the lowest id on
    ties.

    >>> SamplingParams(temperature=0.7, top_p=0.9, stop=("\\n\\n",), seed=7).greedy
    False
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    radixlm.runtime.errors.InvalidParameter: top_p is 1.5; it must be from 0 to 1

    Raises:
        InvalidParameter: a value is outside its range; the message has the name, the value and the range.
    """

    max_tokens: int | None = None  # None: up to the context length; 0: the prompt is computed, and nothing comes
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 0: the most likely token
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and reply; 1.0: none
    presence_penalty: float = 0.0  # over the reply
    frequency_penalty: float = 0.0  # over the reply
    seed: int | None = None  # None: a fresh one from the operating system
    stop: tuple[str, ...] = ()  # the reply ends before the first of these
    stop_regex: tuple[str, ...] = ()  # likewise, before the first match of these regular expressions
    # the answer has none of these, in whatever case: a token that begins one is taken back, and another is chosen
    banned_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the generated token's and the k most likely ones'
    ignore_eos: bool = False  # go on past the model's own end-of-sequence tokens
    # none of the first so many tokens ends the reply, nor completes a stop string; a full context and a grammar that is
    # complete end it all the same
    min_tokens: int = 0
    prompt_logprobs: int | None = None  # None: none; k: those of the prompt's tokens, and the k most likely ones'

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 0, optional=True)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = (
                f"min_tokens is {self.min_tokens}, and at most {self.max_tokens} tokens may come; lower min_tokens"
            )
            raise InvalidParameter(message, param="min_tokens")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        # Logits divided by less could overflow.
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter(f"ignore_eos is {self.ignore_eos!r}; it must be true or false", param="ignore_eos")
        self._check_texts("stop", MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        self._check_texts("stop_regex", MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if self.stop_regex:
            automaton_of(self.stop_regex)
        self._check_texts("banned_strings", MAX_BANNED_STRINGS, MAX_BANNED_LENGTH)
        if (length := sum(map(len, self.banned_strings))) > MAX_BANNED_CHARACTERS:
            message = f"banned_strings have {length} characters; at most {MAX_BANNED_CHARACTERS} do"
            raise InvalidParameter(message, param="banned_strings")
        self._check_stop_token_ids()
        self._check_logit_bias()

    @classmethod
    def recommended(cls, defaults: SamplingDefaults) -> SamplingParams:
        """What an artifact has for requests that do not say it."""
        return cls(**msgspec.structs.asdict(defaults))

    @property
    def defaults(self) -> SamplingDefaults:
        """Of these, what an artifact may have."""
        return SamplingDefaults(**{name: getattr(self, name) for name in SamplingDefaults.__struct_fields__})

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias acts on the logits before temperature does."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a reply, where these are the model's own."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)

    def _check_texts(self, name: str, most: int, longest: int) -> None:
        """Have a field be a tuple of at most `most` strings of 1 to `longest` characters."""
        texts = getattr(self, name)
        if isinstance(texts, str):
            raise InvalidParameter(f"{name} is the string {texts!r}; it must be a tuple of strings", param=name)
        texts = self._as_tuple(name)
        if len(texts) > most:
            raise InvalidParameter(f"{name} has {len(texts)} strings; at most {most} do", param=name)
        for text in texts:
            if not isinstance(text, str) or not 0 < len(text) <= longest:
                raise InvalidParameter(
                    f"{name} has {text!r:.60}; each must be a string of 1 to {longest} characters", param=name
                )

    def _check_stop_token_ids(self) -> None:
        for token_id in self._as_tuple("stop_token_ids"):
            _check_int("stop_token_ids", token_id, 0)

    def _as_tuple(self, name: str) -> tuple[object, ...]:
        value = getattr(self, name)
        if not isinstance(value, Iterable):
            raise InvalidParameter(f"{name} is {value!r:.60}; it must be a tuple", param=name)
        object.__setattr__(self, name, tuple(value))
        return tuple(getattr(self, name))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter(
                f"logit_bias is {self.logit_bias!r:.60}; it must map token ids to numbers", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_float(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
        # A dict of its own, not a read-only view: that could not be pickled, copied or passed to `asdict`.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


def _check_int(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Raise InvalidParameter unless `value` is an integer in `[low, high]`, both included."""
    if value is None and optional:
        return
    allowed = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(f"{name} is {value!r:.60}; it must be {allowed}", param=_field(name))
    if value < low or (high is not None and value > high):
        raise InvalidParameter(f"{name} is {value}; it must be {allowed}", param=_field(name))


def _check_float(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidParameter unless `value` is a finite number in `[low, high]`."""
    allowed = f"from {low:g} to {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidParameter(f"{name} is {value!r:.60}; it must be {allowed}", param=_field(name))
    if not math.isfinite(value) or value < low or value > high:
        raise InvalidParameter(f"{name} is {value}; it must be {allowed}", param=_field(name))


def _field(name: str) -> str:
    """The field's own name: `logit_bias of token 5` is a part of one."""
    return name.partition(" ")[0]
