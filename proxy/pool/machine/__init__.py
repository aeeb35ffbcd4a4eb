"""What this machine has, and how a doctor reports it: the part that `proxy doctor` and `trainer doctor` share. What
each of them needs is not decided here.
"""
