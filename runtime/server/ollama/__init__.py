"""Ollama's endpoints: what clients send, what they get."""
