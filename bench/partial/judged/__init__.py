"""Questions with answers that a program judges, and the replies of a model that has a part of its prefix."""
