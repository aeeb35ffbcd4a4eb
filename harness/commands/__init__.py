"""The verbs of `harness`, one module each. Logic lives in the rooms beside this one."""
