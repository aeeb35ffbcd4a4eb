"""`proxy doctor`: what this machine has for an engine and a proxy, and whether a settings file can run here. Nothing is
changed or started.
"""
