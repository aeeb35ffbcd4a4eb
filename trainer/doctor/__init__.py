"""`trainer doctor`: what this machine has to train on, and whether a training file can run here. Nothing is changed or
started.
"""
