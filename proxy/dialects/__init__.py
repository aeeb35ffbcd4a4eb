"""One module per API dialect, which reads requests and writes answers. Token ids and recording live elsewhere."""
