"""`proxy dashboard`: pages that show a pool in the browser. Read-only, a process of its own, on loopback. Its queries
are in proxy/pool/browse.
"""
