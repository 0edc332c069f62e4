"""Where the beginning of a prompt comes from when memory does not have it: loads from the store, saves to it."""
