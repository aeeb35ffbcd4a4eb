"""Answers from recorded attempts in the engine's place: whole attempts, or the turns that an attempt begins with.
Nothing is sampled here.
"""
