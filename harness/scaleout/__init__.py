"""The same attempts on many machines: a Ray cluster's nodes work, the harness drives."""
