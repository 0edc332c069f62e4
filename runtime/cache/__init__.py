"""The KV of prompts in memory: pages, sequences, transactions, and the tree that finds what was computed before."""
