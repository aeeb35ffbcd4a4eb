"""Sandboxes without Docker: processes, bubblewrap, their files and leftovers."""
