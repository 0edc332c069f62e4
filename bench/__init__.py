"""Benchmarks, each a command: `python -m bench.NAME` in the repository's root; see `make bench`, `make bench-peers`."""
