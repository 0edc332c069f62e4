"""Vectors of texts and scores of documents: what embedding models and rerankers are asked for."""
