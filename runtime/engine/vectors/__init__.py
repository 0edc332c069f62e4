"""Embeddings of texts and scores of documents, from embedding models and rerankers."""
