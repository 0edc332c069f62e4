"""Guess the next tokens of a reply, so that one step checks several: drafts, where they come from, how many pay.

Knows token ids, the radix tree and seconds; not requests, steps or models.
"""
