"""Reading the pool for people: show, verify, export, status. Nothing here writes rows."""
