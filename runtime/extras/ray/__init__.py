"""Several engines behind one address, with Ray Serve: each request goes where its prefix is."""
