"""examples/agents/shell_agent.py, whose first command takes long. Run it as `python -I -S slow_agent.py`.

$SLEEPS holds the seconds of all attempts at the task $TASK. Each attempt takes the next ones by making a file in the
directory $TAKEN, so the attempts of a group sleep equally long in every run of the same tasks. The time counts as the
command's. An attempt that runs no command does not sleep.
"""

import os
import sys
import time
from itertools import count
from typing import Any

sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/../../examples/agents")

import shell_agent  # noqa: E402  # -I keeps its directory off the path until here


def next_sleep() -> float:
    """Return the seconds of the next attempt. A retried attempt has those of an earlier one once all are taken."""
    sleeps = [float(text) for text in os.environ["SLEEPS"].split()]
    for number in count():
        try:
            os.close(os.open(f"{os.environ['TAKEN']}/{os.environ['TASK']}.{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return sleeps[number % len(sleeps)]
    raise AssertionError("count() does not end")


def main() -> int:
    waiting, run = [next_sleep()], shell_agent.run

    def slowly(function: dict[str, Any], seconds: float) -> str:
        if waiting:
            time.sleep(waiting.pop())
        return run(function, seconds)

    shell_agent.run = slowly
    return shell_agent.main()


if __name__ == "__main__":
    sys.exit(main())
