"""One module per API dialect: parses its requests, writes its answers. No recording, no tokens."""
