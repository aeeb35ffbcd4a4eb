"""A user's function between pool and batch: called in a limited process, its answers stored with the lease."""
