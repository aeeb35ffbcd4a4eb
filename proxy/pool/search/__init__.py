"""Search: an index of replies, results and outcomes beside a pool, which the dashboard builds. Nothing is written to
the pool.
"""
