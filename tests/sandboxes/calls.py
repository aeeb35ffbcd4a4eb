"""Calls that sandboxes refuse, and what a program inside gets for them."""

import ctypes
import json

from sandboxes.base import Limits, Sandbox

CALLS = {
    "io_uring_setup": (1, 0),
    "ptrace": (0, 0, 0, 0),
    "process_vm_readv": (1, 0, 0, 0, 0, 0),
    "process_vm_writev": (1, 0, 0, 0, 0, 0),
    "pidfd_getfd": (0, 0, 0),
    "keyctl": (0, -3, 0),
    "add_key": (0, 0, 0, 0, -3),
    "request_key": (0, 0, 0, -3),
    "userfaultfd": (0,),
    "unshare": (0x10000000,),
    "clone": (0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (0, 0),
    "socket": (40, 1, 0),
}
"""Call -> arguments for which an unfiltered kernel has another answer, or makes a user namespace or a vsock."""
TRY_CALLS = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
own = os.getpid()
for name, (number, arguments) in json.loads(sys.argv[1]).items():
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    if os.getpid() != own:
        os._exit(0)
    print(name, errno.errorcode[ctypes.get_errno()] if result == -1 else "worked")
"""


async def call_answers(sandbox: Sandbox, python: str) -> dict[str, str]:
    """Each call of CALLS, and the name of its error, as a program inside sees it."""
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    numbered = {name: (resolve(name.encode()), arguments) for name, arguments in CALLS.items()}
    command = f"{python} -c '{TRY_CALLS}' '{json.dumps(numbered)}'"
    result = await sandbox.run(command, Limits(), {})
    assert result.exit_code == 0, result.output
    return dict(line.split() for line in result.output.splitlines())
