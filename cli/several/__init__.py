"""`radixlm serve` of several models: which there are, and the process of each."""
