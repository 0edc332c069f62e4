"""A log of all changes to the KV of sequences, and its replay, which finds the first invalid line."""
