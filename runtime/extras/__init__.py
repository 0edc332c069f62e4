"""Features that the rest works without. Each folder here can be removed; what asks for it then says so."""
