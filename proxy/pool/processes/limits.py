"""Limits that a process sets itself before it does what it cannot trust. For every package."""

import resource


def limit_this_process(memory_bytes: int, cpu_seconds: int | None = None) -> None:
    """Limit the address space and the CPU time of this process, and forbid core files.

    Beyond its CPU time a process gets SIGXCPU, and SIGKILL, which tells no cause, only 5 s later.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
