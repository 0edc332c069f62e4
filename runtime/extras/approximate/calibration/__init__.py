"""What a model's own attention decides about parts of prefixes: measured once, and kept beside the artifact."""
