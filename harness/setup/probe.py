"""Prints as JSON which kind of sandbox a run would get here: `python -m harness.setup.probe`, for `proxy doctor`."""

import json
import sys

from harness.setup.sandbox_choice import choose


def main() -> int:
    """Print the choice without any task or option."""
    choice = choose("auto", ())
    print(json.dumps({"kind": choice.kind, "promise": choice.promise, "passed_over": choice.passed_over}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
