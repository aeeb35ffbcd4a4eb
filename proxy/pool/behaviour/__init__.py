"""Behaviour: what an attempt's completions did, as events with evidence. Pure functions over recorded completions, no
queries.
"""
