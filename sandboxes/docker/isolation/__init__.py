"""What keeps containers apart from their host beyond the profiles: the filter of system calls, routes, runtimes."""
