"""The line that Claude Code puts before the system's words, with a number of its own for each request.

It would hide all that stands behind it from the cache, and means nothing to a model.
"""

from __future__ import annotations

BILLING_LINE = "x-anthropic-billing-header:"


def is_billing_line(text: str) -> bool:
    """Whether a text is that line, and nothing else.

    >>> is_billing_line("x-anthropic-billing-header: cc_version=2.1; cch=fa690;"), is_billing_line("Be brief.")
    (True, False)
    """
    return text.startswith(BILLING_LINE) and len(text.splitlines()) == 1


def without_billing_line(system: object) -> object:
    """What a body has as `system`, whatever it is, without a first block that is the line."""
    if isinstance(system, list) and system and isinstance(system[0], dict):
        text = system[0].get("text")
        if isinstance(text, str) and is_billing_line(text):
            return system[1:]
    return system
