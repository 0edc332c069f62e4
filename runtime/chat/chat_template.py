"""Render a conversation with the model's own chat template.

A template is untrusted code. It runs in Jinja's immutable sandbox with the functions that `transformers` provides
(loop controls, `generation`, `tojson`, `raise_exception`, `strftime_now`), and with limits on its size, its output,
its time and its intermediate values. Knows text, not tokens: `tokenizer_fix` encodes the text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

import msgspec

from ..errors import InvalidParameter, InvalidRequest
from .render_budget import RenderBudget, TooCostly
from .template_sandbox import TemplateSandbox

__all__ = ["MAX_RENDERED_LENGTH", "MAX_TEMPLATE_LENGTH", "ChatTemplate", "checked_kwargs", "fault_of"]

MAX_TEMPLATE_LENGTH = 1 << 20  # characters; the longest published template has some ten thousand
MAX_RENDERED_LENGTH = 1 << 25  # characters
MAX_KWARGS_BYTES = 4096  # as JSON
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """A compiled chat template.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi'

    Args:
        source: the Jinja template.
        bos_token: text of the beginning-of-sequence token; many templates begin with it.
        eos_token: text of the end-of-sequence token.

    Attributes:
        sought_texts: texts that the template compares with others, or searches for in them.

    Raises:
        InvalidRequest: the template is too long or is not valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE_LENGTH:
            raise InvalidRequest(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_LENGTH} are allowed; "
                "compile the model with a shorter one"
            )
        self.source, self._special_tokens = source, {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = _sandbox()
        try:
            self._template, self._literals, self.sought_texts = self._sandbox.compiled(source)
        except Exception as error:  # Python's own errors, too, such as an expression too deep for its parser
            raise InvalidRequest(f"the model's chat template is not valid Jinja: {_reason(error)}") from error

    def of_model(self, *, bos_token: str, eos_token: str) -> ChatTemplate:
        """Return the same template for a model with these tokens."""
        template = copy.copy(self)
        template._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        return template

    @property
    def own_texts(self) -> tuple[str, ...]:
        """The texts that the template itself writes: its literals, and short conversations that it renders.

        >>> ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}").own_texts[:3]
        ('<|', '|>', '<|user|>a')
        """
        rendered = []
        for messages in _EXAMPLES:
            with suppress(InvalidRequest):  # it may require other conversations
                rendered.append(self.render(messages))
        return (*self._literals, *rendered)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of `messages`, ready to be continued by the assistant if `add_generation_prompt`.

        The template gets `messages` and `tools` unchanged, and cannot change them. Many templates ignore tools.
        `kwargs` are more variables, which a template may use (`enable_thinking`, `reasoning_effort`) or not.

        >>> template = ChatTemplate("{% if enable_thinking is false %}/no_think{% endif %}")
        >>> template.render([], kwargs={"enable_thinking": False})
        '/no_think'

        Raises:
            InvalidRequest: the template refuses the messages or fails on them, or the text is too long or too costly.
        """
        pieces: list[str] = []
        length = 0
        try:
            variables = {
                "xml_tools": list(tools) or None,  # SmolLM3's name for them; clients can override it
                **(kwargs or {}),
                "messages": [dict(message) for message in messages],
                "tools": list(tools) or None,
                "add_generation_prompt": add_generation_prompt,
                **self._special_tokens,
            }
            for piece in self._sandbox.render_pieces(self._template, variables, RenderBudget()):
                length += len(piece)
                if length > MAX_RENDERED_LENGTH:
                    raise InvalidRequest(
                        f"the chat template makes more than {MAX_RENDERED_LENGTH} characters of these "
                        "messages; send shorter ones"
                    )
                pieces.append(piece)
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        except TooCostly as error:
            raise InvalidRequest(f"the chat template does too much with these messages: {error}") from error
        except InvalidRequest:
            raise
        # A template computes with client input, so every exception in it is the request's fault.
        except Exception as error:
            raise InvalidRequest(f"the chat template fails on these messages: {_reason(error)}") from error
        return "".join(pieces)

    def reply_renderer(self) -> Callable[[str], str] | None:
        """Return a function that writes a reply as later prompts have it: after its prompt, with the same white space.

        Found by rendering a short conversation; None if the template does not put the reply right after the prompt.

        >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
        ...                         "{% if add_generation_prompt %}[assistant]{% endif %}")
        >>> template.reply_renderer()("Sure. ")
        ' Sure.'
        """
        asked: list[Mapping[str, object]] = [{"role": "user", "content": "a"}]
        try:
            prompt = self.render(asked)
            later = self.render([*asked, {"role": "assistant", "content": _PROBE}], add_generation_prompt=False)
        except InvalidRequest:
            return None
        prompt = prompt.removesuffix(" ")  # a lone space at its end is stripped
        lead, found, rest = later[len(prompt) :].partition(_PROBE.strip())
        if not later.startswith(prompt) or not found or lead.strip():
            return None
        before, after = _PROBE.split("xyzzy")
        keeps_left, keeps_right = lead.endswith(before), rest.startswith(after)
        lead, rest = lead.removesuffix(before), rest.removeprefix(after)
        white = rest[: len(rest) - len(rest.lstrip())]

        def render(text: str) -> str:
            text = text if keeps_left else text.lstrip()
            return lead + (text if keeps_right else text.rstrip()) + white

        return render


def checked_kwargs(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Return `kwargs` if a template can get them together with its own variables.

    Raises:
        InvalidParameter: one has the name of the template's own, Llama's built-in tools are requested, they are no
            JSON, or more than 4 KiB of it.
    """
    if kwargs.get("builtin_tools"):
        raise InvalidParameter(
            "chat_template_kwargs has 'builtin_tools', whose calls (<|python_tag|>NAME.call(...)) are not read here; "
            "describe these tools in tools",
            param="chat_template_kwargs",
        )
    for name in kwargs:
        if name in RESERVED_KWARGS:
            raise InvalidParameter(
                f"chat_template_kwargs has {name!r}, which the server sets itself; leave it out",
                param="chat_template_kwargs",
            )
    try:
        num_bytes = len(msgspec.json.encode(kwargs))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(
            f"chat_template_kwargs is no JSON: {_reason(error)}; send an object of plain values",
            param="chat_template_kwargs",
        ) from error
    if num_bytes > MAX_KWARGS_BYTES:
        raise InvalidParameter(
            f"chat_template_kwargs has {num_bytes} bytes, at most {MAX_KWARGS_BYTES} are allowed; send less",
            param="chat_template_kwargs",
        )
    return kwargs


def fault_of(source: str) -> str | None:
    """Return why a template cannot be used; None if it can. It may still refuse messages.

    >>> fault_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    True
    """
    try:
        ChatTemplate(source)
    except InvalidRequest as error:
        return str(error)
    return None


_TURNS: tuple[Mapping[str, object], ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "tool", "content": "c", "name": "d", "tool_call_id": "e"},
)
_EXAMPLES = (_TURNS[:1], _TURNS[:2], _TURNS, ({"role": "system", "content": "f"}, *_TURNS[:1]))
_PROBE = "\t\nxyzzy\n\t"  # a reply with white space on both sides that no template writes


class _Refused(Exception):
    """An error of a template that called `raise_exception`."""


def _sandbox() -> TemplateSandbox:
    """Return the environment that `transformers` renders chat templates in."""
    sandbox = TemplateSandbox()
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _reason(error: BaseException) -> str:
    """Return the error's message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
