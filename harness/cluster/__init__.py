"""Runs attempts on the nodes of a Ray cluster. What an attempt does is in harness/rollout."""
