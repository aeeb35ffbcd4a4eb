"""Runs agents at tasks: rollouts, their sandboxes and verdicts. Models are reached through the proxy only."""
