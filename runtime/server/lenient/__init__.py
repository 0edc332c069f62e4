"""Requests that are not as documented, read as what they can only mean."""
