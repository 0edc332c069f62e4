"""Prefixes of which only the rows that matter are read: attention scores, the choice of rows, their loads."""
