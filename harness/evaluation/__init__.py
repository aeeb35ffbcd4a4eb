"""Evaluates the policy of a training run while it trains, in runs of their own."""
