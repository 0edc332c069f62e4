"""Speculative decoding: draft the next tokens of a reply, so that one step can verify several of them.

Has the sources of draft tokens, and decides how many are worthwhile. Knows token ids, the radix tree and seconds; not
requests, steps or models.
"""
