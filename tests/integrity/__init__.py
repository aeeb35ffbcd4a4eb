"""Detectors of reward hacking against cheats and honest look-alikes."""
