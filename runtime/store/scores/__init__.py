"""What was learned of the rows of stored pages, beside them on disk."""
