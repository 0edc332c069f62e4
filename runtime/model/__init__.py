"""One ragged forward of a compiled model: its batch, its runner, the rows of its KV."""
