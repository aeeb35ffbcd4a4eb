"""Learn to take notes: success with trained notes, without notes, and with notes that are left out of training.

A tiny model works at tasks that do not fit into its context of 512 tokens (readings.py), with the project's own agent,
which asks for notes when the context is nearly full. It is warm-started on a teacher whose notes keep the needed word
in 60 % of cases. Then it is trained twice from the same weights with the verifier's verdict alone: with its notes, and
without them (a function of the user, examples/batch_function.py, leaves them out). Everything is real: SGLang on this
machine's CPU, `trainer launch`, `harness run`. Prints one JSON object as the last line. Left out: a model that learns
when to take notes.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contexts.learned_notes import QUICK, WITHOUT_NOTES, NotesRun, Sizes
from benchmarks.result import provenance, write_result


def learned(directory: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """The figures of one seed."""
    trained = NotesRun(directory / "trained", sizes, seed, Console())
    masked = NotesRun(directory / "masked", sizes, seed, Console())
    figures = {}
    try:
        trained.prepare()
        trained.warm_up()
        masked.prepare()
        masked.begin_like(trained)
        for name, run, function in (("trained", trained, ""), ("masked", masked, WITHOUT_NOTES)):
            run.say(f"{name}: {'its notes are left out' if function else 'with its notes'}")
            figures[name] = run.train(function, without=run is trained)
            run.close()
    finally:
        trained.close()
        masked.close()
    return {
        "success_without": figures["trained"]["without"].mean,
        "success_before": figures["trained"]["before"].mean,
        "success_trained": figures["trained"]["after"].mean,
        "success_masked_summaries": figures["masked"]["after"].mean,
        "context_tokens_p95": figures["trained"]["context_tokens_p95"],
        "runs": figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small step each; the figures mean nothing")
    parser.add_argument("--seed", type=int, default=0, help="of model, tasks and sampling (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep pools and logs in this new directory")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally` blocks, which end the services
    sizes = QUICK if arguments.quick else Sizes()
    figures = provenance("context.py") | {"seed": arguments.seed, "sizes": sizes}
    with tempfile.TemporaryDirectory(prefix="blackforge-context-") as temporary:
        directory = (arguments.keep or Path(temporary)).absolute()
        figures |= learned(directory, sizes, arguments.seed)
    write_result(figures, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
