"""Sandboxes that are containers of a Docker engine, local or remote."""
