"""Sandboxes as Docker containers: images, networks, files, warm pool, leftovers. What all backends share lies above."""
