"""Several engines at one address, with Ray Serve: each request goes where its prefix is cached."""
