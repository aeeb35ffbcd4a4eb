"""What keeps containers apart from their host: the filter of system calls, routes, runtimes. The profiles are in
sandboxes/docker/profiles.py.
"""
