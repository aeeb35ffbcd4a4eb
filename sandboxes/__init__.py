"""Where agents run: a directory, processes with limits, and a way out that leaves nothing behind."""
