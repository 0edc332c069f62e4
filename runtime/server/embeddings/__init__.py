"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: vectors of texts, and scores of documents."""
