"""The sampling parameters of a request: how tokens are chosen and when the reply ends, validated.

Each parameter is declared only here: the requests of all APIs and the flags of the command line are made from this.
Knows ranges, not logits; `sampler.py` applies them. What depends on the model (is this token id in the
vocabulary) is checked by `RequestLimits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..artifact.manifest import USUAL_SAMPLING, SamplingDefaults
from ..chat.text_rules.pattern import automaton_of
from ..errors import InvalidParameter
from ..fields import Flag, brief, check_fields, documented, normalize_fields, option

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17  # numbers per request: tokens of its prompts times one plus `prompt_logprobs`
MAX_REPLY_LOGPROBS = 1 << 19  # the same for all replies of a request: some 170 MB as JSON
MAX_BANNED_CHARACTERS = 16384  # of all banned strings


def _usual(name: str) -> str:
    """Return the documented default of a parameter that an artifact can set."""
    return f"the model's, else {getattr(USUAL_SAMPLING, name):g}"


@documented
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Field names and meanings follow OpenAI's and vLLM's APIs.

    An unset field has no effect. The model's own defaults are `Engine.default_params`;
    `dataclasses.replace(engine.default_params, temperature=0.7)` keeps the others.

    The order is: repetition, presence and frequency penalty, DRY, logit bias, top-n-sigma, temperature, then top-k,
    top-p, min-p and XTC, each applied to the tokens that the previous ones left. `temperature=0` takes the most likely
    token, the lowest id on ties.

    >>> SamplingParams(temperature=0.7, top_p=0.9, stop=("\\n\\n",), seed=7).greedy
    False
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    radixlm.runtime.errors.InvalidParameter: top_p is 1.5; it must be a number from 0 to 1

    Raises:
        InvalidParameter: a value is outside its range; the message has the name, the value and the range.
    """

    max_tokens: int | None = option(
        None,
        "Most tokens of a reply; 0: the prompt is computed, and nothing is generated.",
        unset="up to the context length",
        low=0,
        off=-1,
        names={"responses": "max_output_tokens", "ollama": "num_predict"},
        flag=Flag("--max-tokens", "sampling"),
    )
    temperature: float = option(
        1.0,
        "0 always takes the most likely token.",
        unset=_usual("temperature"),
        low=0,
        high=100,
        flag=Flag("--temperature", "sampling"),
    )
    top_k: int = option(
        0,
        "Sample from this many tokens; 0 is all.",
        unset=_usual("top_k"),
        low=0,
        off=-1,
        flag=Flag("--top-k", "sampling"),
    )
    top_p: float = option(
        1.0,
        "Sample from the tokens that make up this probability; 0: from the most likely one.",
        unset=_usual("top_p"),
        low=0,
        high=1,
        flag=Flag("--top-p", "sampling"),
    )
    min_p: float = option(
        0.0,
        "Drop tokens below this share of the best one's probability.",
        unset=_usual("min_p"),
        low=0,
        high=1,
        flag=Flag("--min-p", "sampling"),
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1, repeat less of prompt and reply.",
        unset=_usual("repetition_penalty"),
        low=0.01,  # logits divided by less could overflow
        high=100,
        names={"ollama": "repeat_penalty"},
        flag=Flag("--repetition-penalty", "sampling"),
    )
    presence_penalty: float = option(0.0, "Above 0, repeat less of the reply.", low=-2, high=2)
    frequency_penalty: float = option(0.0, "Above 0, repeat less of the reply the more often it came.", low=-2, high=2)
    seed: int | None = option(
        None,
        "Make sampling repeatable.",
        unset="a fresh one from the operating system",
        low=-(2**63),
        high=2**64 - 1,
        off=-1,
        flag=Flag("--seed", "sampling"),
    )
    stop: Sequence[str] = option(
        (),
        "End the reply before this.",
        most=16,
        longest=1024,
        names={"messages": "stop_sequences"},
        flag=Flag("--stop", "sampling", metavar="TEXT"),
    )
    stop_regex: Sequence[str] = option(
        (),
        "End the reply before the first match of this regular expression.",
        most=16,
        longest=1024,
        flag=Flag("--stop-regex", "sampling", metavar="REGEX"),
    )
    banned_strings: Sequence[str] = option(
        (),
        "Continue the reply without this, in whatever case: a token that begins it is removed, and another is sampled.",
        most=512,
        longest=256,
        flag=Flag("--ban", "sampling", metavar="TEXT"),
    )
    stop_token_ids: Sequence[int] = option(
        (), "End the reply with one of these tokens, besides the model's own end-of-sequence tokens.", most=1024
    )
    logit_bias: Mapping[int, float] = option(
        dict, "Added to the logits of these token ids.", low=-100, high=100, most=1024
    )
    logprobs: int | None = option(
        None,
        "Log probabilities of each token of the reply and of this many most likely ones.",
        unset="none",
        low=0,
        high=MAX_LOGPROBS,
        apis=(),
    )
    ignore_eos: bool = option(False, "Go on past the model's own end-of-sequence tokens.")
    min_tokens: int = option(
        0,
        "None of the first so many tokens ends the reply, nor completes a stop string; a full context and a grammar "
        "that is complete end it all the same.",
        low=0,
        off=-1,
    )
    prompt_logprobs: int | None = option(
        None,
        "Log probabilities of each token of the prompt and of this many most likely ones.",
        unset="none",
        low=0,
        high=MAX_LOGPROBS,
        apis=("openai",),
    )
    xtc_probability: float = option(
        0.0,
        "XTC (exclude top choices): how often all likely tokens but the least likely of them are left out; 0: never.",
        low=0,
        high=1,
        flag=Flag("--xtc-probability", "sampling"),
    )
    xtc_threshold: float = option(
        0.1,
        "XTC: the probability, after all other cuts, from which a token is a likely one.",
        low=0,
        high=1,
        flag=Flag("--xtc-threshold", "sampling"),
    )

    dry_multiplier: float = option(
        0.0,
        "DRY (don't repeat yourself): penalty for a token that extends a repetition. It is "
        "dry_multiplier * dry_base ** (length - dry_allowed_length); 0 turns DRY off.",
        low=0,
        high=100,
        flag=Flag("--dry-multiplier", "sampling"),
    )
    dry_base: float = option(
        1.75,
        "DRY: how much the penalty grows with each token of the repetition.",
        low=1,
        high=8,
        flag=Flag("--dry-base", "sampling"),
    )
    dry_allowed_length: int = option(
        2,
        "DRY: the shortest repetition, in tokens, that is penalized.",
        low=1,
        high=64,
        flag=Flag("--dry-allowed-length", "sampling"),
    )
    dry_penalty_last_n: int = option(
        -1,
        "DRY: how many of the last tokens are searched for repetitions; -1: all.",
        low=-1,
        flag=Flag("--dry-penalty-last-n", "sampling"),
    )
    dry_sequence_breakers: Sequence[str] = option(
        ("\n", ":", '"', "*"),
        "DRY: a repetition ends at a token that contains one of these, in either case; such tokens are never "
        "penalized.",
        most=64,
        longest=64,
    )
    top_n_sigma: float = option(
        0.0,
        "Top-n-sigma: drop tokens whose logits are more than so many standard deviations of the logits below the best "
        "one's, whatever the temperature; 0: drop none.",
        low=0,
        off=-1,
        flag=Flag("--top-n-sigma", "sampling"),
    )

    def __post_init__(self) -> None:
        normalize_fields(self)
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = (
                f"min_tokens is {self.min_tokens}, and at most {self.max_tokens} tokens may come; lower min_tokens"
            )
            raise InvalidParameter(message, param="min_tokens")
        if self.stop_regex:
            automaton_of(self.stop_regex)
        if (length := sum(map(len, self.banned_strings))) > MAX_BANNED_CHARACTERS:
            message = f"banned_strings have {length} characters; at most {MAX_BANNED_CHARACTERS} do"
            raise InvalidParameter(message, param="banned_strings")

    __repr__ = brief

    @classmethod
    def recommended(cls, defaults: SamplingDefaults) -> SamplingParams:
        """Return the parameters that an artifact recommends."""
        return cls(**msgspec.structs.asdict(defaults))

    @property
    def defaults(self) -> SamplingDefaults:
        """The subset of these parameters that an artifact can recommend."""
        return SamplingDefaults(**{name: getattr(self, name) for name in SamplingDefaults.__struct_fields__})

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def needs_token_texts(self) -> bool:
        """Return whether the texts of all tokens are needed; computing them takes a fifth of a second once."""
        return bool(self.banned_strings) or self.dry_multiplier != 0.0

    @property
    def changes_logits(self) -> bool:
        """Return whether a penalty or a bias changes the logits before temperature is applied."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.dry_multiplier != 0.0
            or bool(self.logit_bias)
        )

    @property
    def cuts(self) -> bool:
        """Return whether unlikely tokens are cut; XTC does the opposite."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0 or self.top_n_sigma > 0.0

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the ids of the tokens that end a reply, given the model's own end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)
