"""Requests with their replies in a file, and the same requests computed again, compared bit by bit."""
