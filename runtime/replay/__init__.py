"""Record requests with their replies in a file; compute them again, and compare bit by bit."""
