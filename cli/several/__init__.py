"""`radixlm serve` with several models: their list, and a process for each."""
