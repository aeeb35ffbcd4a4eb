"""Starts SGLang's server on the CPU in half the time: forks its processes from one that has imported everything.

SGLang 0.5.23 spawns them, as CUDA requires, so that each imports torch and SGLang again: eleven of the twenty-two CPU
seconds of a start. `python -m proxy.engine.cpu.launch` takes the arguments of `sglang.launch_server`.
"""

import atexit
import gc
import multiprocessing
import runpy
from typing import Any


def main() -> None:
    """Run the server in this process."""
    set_start_method: Any = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=True)
    gc.disable()  # loading makes hardly any garbage, and looking for it took a sixth of the time
    import sglang.srt.managers.detokenizer_manager  # what the forked processes run
    import sglang.srt.managers.scheduler  # noqa: F401

    gc.freeze()  # what is loaded stays for good: the forks' collections do not look at it, or copy its pages
    atexit.register(gc.unfreeze)  # or Triton's nanobind ends the log with a long list of leaks, below any error
    gc.enable()
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
