"""The official SDKs and agent frameworks, as they are, against the proxy: each in a locked environment of its own."""
