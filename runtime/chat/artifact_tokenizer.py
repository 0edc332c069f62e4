"""Make the tokenizer and the chat template that an artifact describes, and check token ids from clients.

Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from radixlm.tokenizer_fix import Tokenizer, TokenizerError, TokenizerProfile, TooManyTokens

from ..artifact import Artifact
from ..errors import ContextLengthExceeded, CorruptArtifact, EmptyPrompt, InvalidParameter, InvalidRequest
from ..system import trim_heap
from .chat_template import ChatTemplate


def open_tokenizer(artifact: Artifact, template: ChatTemplate | None, clock: Callable[[], float]) -> Tokenizer:
    """Return the tokenizer, which distinguishes what the template writes from what clients type.

    Args:
        clock: seconds; only differences count.

    Raises:
        CorruptArtifact: the tokenizer cannot be used.
    """
    info = artifact.manifest.tokenizer
    try:
        profile = TokenizerProfile.from_dict(info.profile)
        ends = (info.bos_token_id, *info.eos_token_ids)
        texts = [token.text for token in profile.added_tokens if token.id in ends]
        tokenizer = Tokenizer(
            artifact.tokenizer_bytes,
            profile,
            bos_token_id=info.bos_token_id,
            add_bos_token=info.add_bos_token,
            template_texts=() if template is None else [*texts, *template.own_texts],
            sought_texts=() if template is None else template.sought_texts,
            clock=clock,
        )
        trim_heap()  # the parsed text is gone by now: four times its size
        return tokenizer
    except TokenizerError as error:
        raise CorruptArtifact(f"{artifact.path}: {error}; compile the model again") from error


def with_ends(template: ChatTemplate, artifact: Artifact, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template with the texts of the beginning and end tokens."""
    info = artifact.manifest.tokenizer
    bos, eos = [info.bos_token_id] if info.bos_token_id is not None else [], list(info.eos_token_ids[:1])
    return template.of_model(
        bos_token=tokenizer.decode(bos, skip_special=False), eos_token=tokenizer.decode(eos, skip_special=False)
    )


@contextmanager
def refusing(*, has_reply: bool = True) -> Iterator[None]:
    """Raise errors of the tokenizer as errors of the request; `has_reply` says that a prompt leaves room for a reply.

    Raises:
        ContextLengthExceeded: a text has too many tokens.
        InvalidRequest: it cannot be encoded, or ids cannot be decoded.
    """
    try:
        yield
    except TooManyTokens as error:
        raise ContextLengthExceeded.of_prompt(
            error.num_tokens, error.max_tokens, is_exact=False, has_reply=has_reply
        ) from error
    except TokenizerError as error:
        raise InvalidRequest(str(error)) from error


def checked_ids(prompt: object, max_tokens: int | None, *, has_reply: bool = True) -> list[int]:
    """Return the ids of a prompt that is a list of token ids; `has_reply` says that it leaves room for a reply.

    Raises:
        ContextLengthExceeded: there are more than `max_tokens`.
        EmptyPrompt: there are none.
        InvalidParameter: they are no token ids.
    """
    if not isinstance(prompt, Sequence):
        raise InvalidParameter(f"a prompt is {prompt!r:.60}; it must be text or a list of token ids")
    if not prompt:
        raise EmptyPrompt("the prompt has 0 token ids; send at least one")
    if max_tokens is not None and len(prompt) > max_tokens:
        raise ContextLengthExceeded.of_prompt(len(prompt), max_tokens, has_reply=has_reply)
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidParameter(f"the prompt has {token_id!r:.60}; it must be text or token ids")
    return list(prompt)
