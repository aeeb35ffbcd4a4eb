"""One rank: `python -m trainer.commands.worker VERB CONFIG [--run NAME] [--set section.key=value]`, started by the
launcher.

Takes the arguments of the command line (trainer/commands/main.py), which has checked them.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.errors import PoolError, UserError
from trainer.commands.logprobs import compare_logprobs
from trainer.commands.main import Command, parse
from trainer.commands.output_lock import hold
from trainer.commands.ranks import die_with_parent
from trainer.commands.sft import warm_start
from trainer.loop import train
from trainer.megatron.parallel import Ranks, process_groups


def main(argv: Sequence[str]) -> int:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which ends the ranks
    command = parse(argv)
    try:
        with process_groups(command.config.parallel) as ranks:
            result = _run(command, ranks)
            if result is not None and ranks.rank == 0:
                print(msgspec.json.encode(result).decode())
    except (UserError, PoolError, OSError) as error:  # OSError: a full disk under checkpoints, a lost directory
        _tell(error)
        return 2
    return 0


def _tell(error: Exception) -> None:
    """To the user; beside other ranks, which may fail of the same, to torchrun, in the file that it reads."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        print(f"error: {error}", file=sys.stderr)
    else:
        Path(file).write_bytes(msgspec.json.encode({"message": str(error), "timestamp": int(time.time())}))


def _run(command: Command, ranks: Ranks) -> dict[str, Any] | None:
    if command.verb != "launch" and ranks.context_world > 1:
        raise UserError(f"parallel.context = {ranks.context_world} is for `trainer launch` alone; set it to 1")
    if command.verb == "logprobs":
        return compare_logprobs(command.config, ranks, command.run)
    if command.verb == "sft":
        return warm_start(command.config, ranks)
    ranks.share(lambda: hold(Path(command.config.output)))
    train(command.config, ranks)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
