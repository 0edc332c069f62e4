"""Approximate KV loading: attention scores, the choice of rows to read, and their loading."""
