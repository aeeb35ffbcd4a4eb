"""Recorded model calls: their rows, labels and routed experts. Their delivery to clients is elsewhere (processes)."""
