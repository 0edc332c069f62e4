"""Names, paths and sentences for the messages of refused requests, by which a client finds its mistake."""
