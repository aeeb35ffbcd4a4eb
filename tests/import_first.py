"""Imports each module that is named on stdin first, in a fork of its own, and prints those that fail with the reason.

`python -m tests.import_first [MODULE ...]`. The arguments are imported once, before the forks. What else our modules
load from other projects is loaded once too, by importing all of them and then forgetting ours, so a fork only runs our
own code. Modules that are arguments, and the packages around them, are not forgotten. Which of UNUSED are loaded then
is printed too.
"""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

PACKAGES = ("proxy", "harness", "trainer", "sandboxes")
UNUSED = ("wandb", "torch._inductor", "triton")
"""Modules that take seconds to load and that no start of ours needs; on a GPU, attention needs the compiler."""


def main(preloaded: Sequence[str], modules: Sequence[str]) -> None:
    for name in preloaded:
        importlib.import_module(name)
    kept = {name for name in sys.modules if name.split(".")[0] in PACKAGES}
    for name in modules:
        with suppress(Exception):  # the fork below reports it
            importlib.import_module(name)
    if "torch" not in sys.modules or not sys.modules["torch"].cuda.is_available():
        for name in set(UNUSED) & set(sys.modules):
            print(f"{name} is loaded, and nothing uses it", flush=True)
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES and name not in kept]:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in kept:
            vars(sys.modules[parent]).pop(child, None)
    gc.freeze()  # the forks' collections skip what is loaded here, which would cost more than the imports
    for name in modules:
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                importlib.import_module(name)
            except BaseException:
                print(f"{name}: {traceback.format_exc().splitlines()[-1]}", flush=True)
                status = 1
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status > 1 << 8:
            print(f"{name}: ended with status {status}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.read().split())
