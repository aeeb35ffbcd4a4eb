"""What leaves the pool: consumed groups go to archive files, then from the tables (docs/pool.md). Archives are read in
proxy/pool/read.
"""
