"""Answers that did not reach their client are kept and served once to a retry of their request.

What each proxy knows of them is here; the tables and their SQL are in proxy/pool/processes/deliveries.py.
"""
