"""`radixlm run`: another name of `radixlm chat`, which users of other tools expect."""

from __future__ import annotations

from copy import copy
from inspect import cleandoc

from ..chat import command as chat

_BELOW_SUMMARY = cleandoc(chat.help or "").partition("\n\n")[2].replace("radixlm chat", "radixlm run")

command = copy(chat)
command.name = "run"
command.help = f"""Download and compile MODEL if needed, then chat with it. Another name of `radixlm chat`.

{_BELOW_SUMMARY}"""
