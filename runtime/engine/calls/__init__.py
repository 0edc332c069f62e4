"""The calls of the Python API: what their arguments mean, and asking for one reply, many, or a stream."""
