"""How replies are rendered is remembered by prompt, at a cost that does not grow with what a prompt was answered."""

from __future__ import annotations

import time

from radixlm.runtime.cache.radix_node import encode_key
from radixlm.runtime.cache.reply_alias import ReplyAlias, ReplyAliases

PROMPT = [3, 1, 4]
MAX_S = 10.0  # to look at all others each time takes half a minute


def test_a_prompt_that_was_answered_in_many_ways_takes_no_longer_to_answer_again() -> None:
    aliases, begun = ReplyAliases(), time.monotonic()
    replies = [ReplyAlias((i, i + 1), b"%d" % i) for i in range(20_000)]
    for reply in replies * 2:
        aliases.record(b"", PROMPT, reply)
        assert time.monotonic() - begun < MAX_S
    assert aliases.find(b"", len(PROMPT), lambda: encode_key(PROMPT)) == tuple(replies)
    assert aliases.num_aliases(b"") == 1
    assert aliases.find(b"other", len(PROMPT), lambda: encode_key(PROMPT)) == ()
