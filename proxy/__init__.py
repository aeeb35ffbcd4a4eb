"""The gateway: an OpenAI-compatible server that records every model call token-exactly, and the pool behind it. No
agents, no training.
"""
