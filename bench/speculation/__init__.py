"""Measure drafts, task by task, with many streams, with a draft model, and in llama.cpp."""
