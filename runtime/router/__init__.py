"""A router for several models behind one address: loads and unloads models, and forwards requests to them."""
