"""One rank, which trainer/commands/ranks.py or torchrun starts: VERB CONFIG [--run NAME] [--set section.key=value].

The arguments are those of the command line (trainer/commands/main.py), which has checked them.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from proxy.pool.errors import PoolError, UserError
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.terminal.errors import error_line, with_page
from trainer.commands.logprobs import compare_logprobs
from trainer.commands.main import TrainerCommand, parse
from trainer.commands.output_lock import lock_output
from trainer.commands.sft import warm_start
from trainer.loop import train
from trainer.megatron.parallel import Ranks, process_groups


def main(argv: Sequence[str]) -> int:
    """Run a command on this rank and return the exit status: 2 for an error that one sentence tells.

    After an error, a rank among several ends the process itself, with the same status.
    """
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which ends the ranks
    command = parse(argv)
    gc.freeze()  # torch and Megatron are loaded for good, so the collector need not look at their million objects
    try:
        with process_groups(command.config.parallel) as ranks:
            result = _run(command, ranks)
            if result is not None and ranks.rank == 0:
                print(msgspec.json.encode(result).decode())
    except (UserError, PoolError, OSError) as error:  # OSError: a full disk under checkpoints, a lost directory
        _report(error)
        status = 2
    except BaseException:  # whatever it was: Python's own end would wait for the other ranks
        if not _among_several():
            raise
        sys.excepthook(*sys.exc_info())
        status = 1
    else:
        return 0
    if _among_several():
        # Python's own way to the end waits for NCCL's threads, and they may wait for the other ranks. What the command
        # has opened is closed by now.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def _among_several() -> bool:
    """Whether this process is still connected to other ranks: after an error, `job` does not leave them."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _report(error: Exception) -> None:
    """Print an error, or under torchrun leave it in the file that torchrun reads: all ranks may have the same one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        print(error_line(error), file=sys.stderr)
    else:
        Path(file).write_bytes(msgspec.json.encode({"message": with_page(error), "timestamp": int(time.time())}))


def _run(command: TrainerCommand, ranks: Ranks) -> dict[str, Any] | None:
    if command.verb != "launch" and ranks.context_world > 1:
        raise UserError(
            f"parallel.context = {ranks.context_world} divides micro-batches, which only `trainer launch` does; set it "
            "to 1"
        )
    if command.verb == "logprobs":
        return compare_logprobs(command.config, ranks, command.run)
    if command.verb == "sft":
        return warm_start(command.config, ranks)
    ranks.share(lambda: lock_output(Path(command.config.output)))
    train(command.config, ranks)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
