"""The KV cache in memory: pages, sequences, transactions, and the radix tree that finds cached prefixes."""
