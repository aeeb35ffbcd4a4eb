"""Trains the policy on the pool's rollouts and pushes its weights to the engines. Nothing is sampled here."""
