"""The commands of `proxy`, and the replay of recorded attempts. Live calls are served by proxy/server.py."""
