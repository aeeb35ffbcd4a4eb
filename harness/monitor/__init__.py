"""Progress display, metrics and hang detection of a run. Nothing here decides on rewards."""
