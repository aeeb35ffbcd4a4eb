"""Runs agents at tasks: rollouts, their sandboxes and verdicts. No models, which are reached through the proxy only."""
