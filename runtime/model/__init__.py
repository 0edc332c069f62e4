"""One ragged forward of a compiled model: its batch, its runner, and the rows of its KV."""
