"""Bounded pages of a pool, for people who look at it. Each reads few rows, however many the pool holds. No HTML."""
