"""What surrounds a call on the wire: keys, admission, limits, error pages, responses, metrics.

No dialects, no tokens.
"""
