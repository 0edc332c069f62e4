"""Records in a store for approximate KV loading: rows of pages by importance, and their scores."""
