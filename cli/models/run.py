"""`radixlm run`: `radixlm chat` by the name that users of other tools know."""

from __future__ import annotations

from copy import copy
from inspect import cleandoc

from ..chat import command as chat

_BELOW_SUMMARY = cleandoc(chat.help or "").partition("\n\n")[2].replace("radixlm chat", "radixlm run")

command = copy(chat)
command.name = "run"
command.help = f"""Download and compile MODEL if need be, then chat with it: `radixlm chat` by another name.

{_BELOW_SUMMARY}"""
