"""Runs, groups, rollouts and attempts: what is to be done and how it ended. No tokens."""
