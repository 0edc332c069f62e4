"""What clients leave on the server: responses, conversations, files and batches."""
