"""Recorded traffic of real agents with its texts replaced, and what plays it through a gateway."""
