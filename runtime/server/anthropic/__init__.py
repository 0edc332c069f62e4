"""Anthropic's Messages API: its endpoints, requests and replies."""
