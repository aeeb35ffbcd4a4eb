"""Bring new weights into the running engines (SGLang). No export of weights, no starting of engines."""
