"""The disk tier of the prefix cache: loads prefixes from the store that memory does not have, and saves new ones."""
