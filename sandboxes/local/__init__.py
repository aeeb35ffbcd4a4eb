"""Sandboxes without Docker: processes, bubblewrap, their files and leftovers. No images, no services."""
