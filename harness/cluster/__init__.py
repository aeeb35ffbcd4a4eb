"""Attempts on the nodes of a Ray cluster. What an attempt does is harness/rollout.py."""
