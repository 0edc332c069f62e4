"""The calls of gpt-oss, whose replies have parts with headers: reasoning, words for the user, and one call.

Knows texts and grammars. What takes the parts of a reply apart writes the header of a call as the template does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..grammar import OVER, Grammar
from .format_texts import BLANK, Rules, escaped, quoted
from .tool_format import Tool, ToolChoice, ToolFormat
from .tool_grammar import content_rule

_RECIPIENT: Final = re.compile(r" to=functions\.([a-zA-Z0-9_.-]+)")
_PART_END: Final = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class HeadedFormat(ToolFormat):
    """A format whose grammars hold whole replies, reasoning among them. The begin of a call may stand behind the name
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
        """As `ToolFormat.grammar`, for all of a reply. A part for a function that is not there is text."""
        start = {"none": "final", "required": "call tail", "auto": "(final | unknown | call tail)"}[choice]
        end, message = quoted(_PART_END, self.specials), quoted("<|message|>", self.specials)
        rules = Rules(
            [
                f"start: part* {start}",
                f"part: ({self._part('analysis')} | {self._part('commentary')}) TEXT? {end}",
                f"final: {self._part('final')} {'TEXT?' if content is None else content_rule(content)}",
                "TEXT: /(.|\\n)+/",
            ]
        )
        if choice != "none":
            kind = f'(" "? {quoted("<|constrain|>", self.specials)} "json" | " json")? {message}'
            rules.add([f"channel: {quoted('<|channel|>commentary', self.specials)}", f"kind: {kind}"])
            rules.add(["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))])
            rules.add([f"tail: /{BLANK}/? | {OVER} TEXT?", f"{OVER}[capture, lazy]: TEXT & ~/{BLANK}/"])
            for number, (tool, (own, more)) in enumerate(zip(tools, self.arguments_rules(tools), strict=True)):
                name = f"to_{number}"
                rules.add([f"{name}: {quoted(self.begin + tool.name)}"])
                rules.add([f"call_{number}: ({name} channel | channel {name}) kind {own}", *more])
        if choice == "auto":
            known = "|".join(escaped(tool.name) for tool in tools)
            rules.add(
                [
                    f"unknown: (RECIPIENT channel | channel RECIPIENT) (WORDS? {message}) TEXT?",
                    "WORDS: /[^\\n]{1,32}/",
                    f"RECIPIENT: / to=[^\\n]{{1,200}}/ & ~/{escaped(self.begin)}({known})( [^\\n]*)?/",
                ]
            )
        return Grammar("lark", "\n".join(rules) + "\n", holds_reasoning=True)

    def _part(self, channel: str) -> str:
        return quoted(f"<|channel|>{channel}<|message|>", self.specials)
