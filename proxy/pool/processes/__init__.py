"""Which process owns a run or serves an answer, and what its crash leaves open. Not what it serves."""
