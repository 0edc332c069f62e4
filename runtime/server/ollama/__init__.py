"""Ollama's API: its endpoints, requests and replies."""
