"""Storage of responses, conversations, files and batches, and their endpoints."""
