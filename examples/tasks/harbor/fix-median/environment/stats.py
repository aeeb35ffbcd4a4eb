def median(values):
    """The middle of the values."""
    values.sort()
    return values[len(values) // 2]
