"""Several models behind one address: which of them are loaded, and passing each request on to its own."""
