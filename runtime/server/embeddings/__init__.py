"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: embeddings of texts, and relevance scores of documents."""
