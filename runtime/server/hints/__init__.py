"""What a client probably meant: names and paths for the messages of refused requests."""
