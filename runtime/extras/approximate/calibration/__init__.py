"""Calibration: measurements of how much of a prefix a model needs, made once and stored with the artifact."""
