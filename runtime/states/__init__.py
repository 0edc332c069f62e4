"""States of recurrent layers: which slots hold them, and which stand in the tree as snapshots."""
