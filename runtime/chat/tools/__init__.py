"""Tool calling: the formats of models' templates, and calls written, constrained and parsed."""
