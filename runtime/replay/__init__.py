"""Do again what a log of KV operations says, and find the first line that cannot be."""
