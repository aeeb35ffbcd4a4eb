"""The filter of system calls of our containers, in the format of the daemon's API.

It takes the place of the daemon's own profile, so it must not be weaker than that. Hence it allows by name and refuses
everything else: of the calls that Linux had when known_calls.txt was written, all but those that bubblewrap sandboxes
are refused (sandboxes/local/system_calls.py) and those that the daemon's own profile keeps for privileged containers. A
deny list would let each new call of a new kernel through. runc answers ENOSYS for calls that are newer than the list,
so C libraries fall back to older ones. clone, socket, setsockopt and personality are allowed with some arguments only.

Profile `harbor` may trace processes, as Harbor's tasks expect: everybody is root there and reaches the files of the
others anyway. It also runs 32-bit programs, which `strict` and services do not: a filter cannot look into socketcall.
"""

import errno
import json
from functools import cache
from pathlib import Path
from typing import Any

from sandboxes.base import Profile
from sandboxes.local.system_calls import AF_VSOCK, NEW_NAMESPACES, REFUSED

PRIVILEGED = (
    *("get_mempolicy", "set_mempolicy", "set_mempolicy_home_node", "mbind", "move_pages", "migrate_pages"),
    *("sethostname", "setdomainname", "socketcall"),
)
"""Refused in containers as well, as by the daemon's own profile. socketcall is the way around the rule for sockets."""
HARBOR = ("ptrace", "process_vm_readv", "process_vm_writev")
"""Allowed in profile harbor."""
CONDITIONAL = ("clone", "clone3", "socket", "setsockopt", "personality")
SOL_SOCKET, SO_BINDTODEVICE = 1, 25
"""A socket that is bound to a device reaches neighbours without a route (sandboxes/network/routes.py)."""
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Those that the daemon's own profile allows: plain Linux, 32-bit addresses, an older kernel's name, and asking."""
ARCHITECTURES = {"SCMP_ARCH_X86_64": ("SCMP_ARCH_X86", "SCMP_ARCH_X32"), "SCMP_ARCH_AARCH64": ("SCMP_ARCH_ARM",)}


@cache
def security_option(profile: Profile, allowed: tuple[str, ...]) -> str:
    """Return the filter as an entry of HostConfig.SecurityOpt. `allowed`: calls that are not refused after all."""
    if profile == "harbor":
        allowed = (*allowed, *HARBOR, "socketcall")
    known = (Path(__file__).parent / "known_calls.txt").read_text().split()
    refused = {*REFUSED, *PRIVILEGED} - {*allowed}
    names = [name for name in known if name not in refused and name not in CONDITIONAL]
    namespaces = {} if "unshare" in allowed else {"args": [_argument(NEW_NAMESPACES, "SCMP_CMP_MASKED_EQ")]}
    rules: list[dict[str, Any]] = [
        {"names": names, "action": "SCMP_ACT_ALLOW"},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW"} | namespaces,
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [_argument(AF_VSOCK, "SCMP_CMP_NE")]},
    ]
    for condition in (_argument(SOL_SOCKET, "SCMP_CMP_NE", 1), _argument(SO_BINDTODEVICE, "SCMP_CMP_NE", 2)):
        rules.append({"names": ["setsockopt"], "action": "SCMP_ACT_ALLOW", "args": [condition]})
    for value in PERSONALITIES:
        rules.append({"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [_argument(value, "SCMP_CMP_EQ")]})
    others = ARCHITECTURES if profile == "harbor" else dict.fromkeys(ARCHITECTURES, ())
    architectures = [{"architecture": one, "subArchitectures": list(others[one])} for one in others]
    return "seccomp=" + json.dumps(
        {"defaultAction": "SCMP_ACT_ERRNO", "archMap": architectures, "syscalls": rules}, separators=(",", ":")
    )


def _argument(value: int, comparison: str, index: int = 0) -> dict[str, Any]:
    """Return a condition on an argument, the first where none is named. For a mask: none of its bits is set."""
    return {"index": index, "value": value, "valueTwo": 0, "op": comparison}
