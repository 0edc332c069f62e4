"""The calls of gpt-oss, whose replies have parts with headers: thoughts, words for the user, and one call.

Knows texts and grammars. What takes the parts of a reply apart writes the header of a call as the template does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..grammar import Grammar
from .lark import Rules
from .tool_format import Tool, ToolChoice, ToolFormat

_RECIPIENT: Final = re.compile(r" to=functions\.([a-zA-Z0-9_.-]+)")
_WHOLE: Final = {"none": "final", "required": "preamble? call", "auto": "(final | preamble? call)"}
_PART_END: Final = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class HeadedFormat(ToolFormat):
    """A format whose grammars hold whole replies, thoughts among them. The begin of a call may stand behind the name
    of its channel, too::

        <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>
        json<|message|>{}
    """

    @property
    def texts(self) -> str:
        """As `ToolFormat.texts`."""
        return super().texts + _PART_END + "<|constrain|><|channel|><|message|>"

    def head_in(self, header: str) -> str | None:
        """The head of the call that a part with this header makes, as the template writes it; None if it makes none."""
        found = _RECIPIENT.search(header)
        return None if found is None else self.head(found[1])

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool = True, content: Grammar | None = None
    ) -> Grammar | None:
        """As `ToolFormat.grammar`, for all of a reply."""
        answer = self._content_rules(content)[0].partition(": ")[2]
        rules = Rules(
            [
                "start: thought* "
                + {"none": "final", "required": "preamble? call"}.get(choice, "(final | preamble? call)"),
                f"thought: {self._part('analysis')} TEXT? {self._quoted(_PART_END)}",
                f"preamble: {self._part('commentary')} TEXT? {self._quoted(_PART_END)}",
                f"final: {self._part('final')} {'TEXT?' if content is None else answer}",
                "TEXT: /(.|\\n)+/",
            ]
        )
        if choice != "none":
            kind = f'(" "? {self._quoted("<|constrain|>")} "json" | " json")? {self._quoted("<|message|>")}'
            rules.add([f"channel: {self._quoted('<|channel|>commentary')}", f"kind: {kind}"])
            rules.add(["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))])
            for number, (tool, (own, more)) in enumerate(zip(tools, self._arguments_rules(tools), strict=True)):
                name = f"to_{number}"
                rules.add([f"{name}: {self._quoted(self.begin)} {self._quoted(tool.name)}"])
                rules.add([f"call_{number}: ({name} channel | channel {name}) kind {own}", *more])
        return Grammar("lark", "\n".join(rules) + "\n", holds_thoughts=True)

    def _part(self, channel: str) -> str:
        return self._quoted(f"<|channel|>{channel}<|message|>")
