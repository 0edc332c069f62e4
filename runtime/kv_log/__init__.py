"""What happens to the KV of sequences, written down; and done again, to find the first line that cannot be."""
