"""Evaluates the policy of a training run while it trains, in runs of their own. Nothing of these is trained on."""
