"""The data pool: tables, states and the scheduler that proxy, harness and trainer share. Imports none of them."""
