"""Makes many files."""

for number in range(20_000):
    open(f"f{number}", "w").close()
