"""The command line of `proxy`, the pool's tools and replay. No serving code."""
