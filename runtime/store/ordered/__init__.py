"""Runs of pages by importance: what is stored of them, how it is read, and what of it stays in memory."""
