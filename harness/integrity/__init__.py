"""Reward hacking: detectors over what an agent did and left, a judge, and what becomes of a rollout that they name. No
verdicts.
"""
