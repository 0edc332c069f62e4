"""How models call tools: the formats of their templates, calls written, constrained and read back."""
