"""Leniency for malformed requests: undocumented forms that can only mean one thing are converted."""
