"""The calls of the Python API: parse their arguments, and request one reply, many, or a stream."""
