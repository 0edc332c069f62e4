"""Features that the rest works without. Each folder here can be removed; using it then raises an error that says so."""
