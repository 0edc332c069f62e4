"""States of recurrent models on disk: each stands behind a page, and leaves with it."""
