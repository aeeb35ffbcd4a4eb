"""Reading the pool for people: show, verify, status. Nothing here writes rows."""
