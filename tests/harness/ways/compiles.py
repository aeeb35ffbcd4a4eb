"""Compiles a module so that Python never compares it with its source. Arguments: the source, and where to."""

import py_compile
import sys

py_compile.compile(
    sys.argv[1],
    sys.argv[2] if len(sys.argv) > 2 else None,
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
)
