"""Rewards from more than a verifier: users' functions, and judges over a whole trajectory. No verifiers."""
