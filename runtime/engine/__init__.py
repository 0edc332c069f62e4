"""The engine: requests from prompt to completion, scheduled step by step over one model and one cache."""
