"""From messages to token ids: chat template, splice of recorded turns, token cache.

Sampled text is parsed elsewhere.
"""
