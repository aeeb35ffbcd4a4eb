"""Detectors that compare what an agent did and left with what its instruction demands and with what judges it. Nothing
here decides what becomes of a rollout.
"""
