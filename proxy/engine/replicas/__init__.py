"""The replicas of the engine: which of them get calls, and what happens to the calls of one that is lost. Nothing here
knows how an engine is asked.
"""
