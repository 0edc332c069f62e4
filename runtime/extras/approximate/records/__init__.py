"""Records that only approximate loading keeps in a store: rows of pages by importance, and what was learned of them."""
