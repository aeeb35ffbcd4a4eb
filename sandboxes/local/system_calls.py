"""The filter of system calls for bubblewrap sandboxes, built with libseccomp.

It refuses what a program inside never needs and what faults in kernels were often found in, or what looks into other
processes. Everything else is allowed: sandboxes run this machine's programs, and nobody here knows all of their calls.
A refused call fails with EPERM, as if the right to it were missing; clone3 fails with ENOSYS, because its flags lie in
memory that a filter cannot read, and C libraries then use clone. Programs for another architecture than this machine's
(32-bit ones) get ENOSYS for every call.

Left out: kernels without seccomp.
"""

import ctypes
import errno
import os
from collections.abc import Collection
from functools import cache
from typing import Any

TRACING = ("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp")
REFUSED = (
    *TRACING,
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd"),
    *("add_key", "request_key", "keyctl"),
    *("bpf", "perf_event_open", "fanotify_init", "lookup_dcookie", "quotactl", "quotactl_fd", "syslog", "vhangup"),
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "move_mount", "open_tree", "open_tree_attr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "statmount", "listmount"),
    "open_by_handle_at",
    *("init_module", "finit_module", "delete_module", "create_module", "query_module", "get_kernel_syms"),
    *("kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "nfsservctl", "uselib", "ustat"),
    *("_sysctl", "sysfs", "vm86", "vm86old", "modify_ldt", "iopl", "ioperm"),
    *("settimeofday", "stime", "clock_settime", "clock_settime64", "clock_adjtime", "clock_adjtime64"),
    *("lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules"),
)
"""Refused in every sandbox."""
NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces: CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS and NEWCGROUP."""
AF_VSOCK = 40
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
"""SCMP_ACT_ALLOW and SCMP_ACT_ERRNO: what the kernel does with a call; the error's number is added to the latter."""
_OTHER_ARCHITECTURE = 2
"""SCMP_FLTATR_ACT_BADARCH: the attribute that says what a call for another architecture gets."""
_EQUAL, _MASKED_EQUAL = 4, 7
"""SCMP_CMP_EQ; and SCMP_CMP_MASKED_EQ, for which `first` is the mask and `second` what must be left under it."""


class _Compare(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp: one condition on an argument of a call."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


def why_not() -> str:
    """Return why no filter can be built here; empty when one can."""
    return "" if _library() else "libseccomp is not installed (apt-get install libseccomp2)"


def environment(allowed: Collection[str]) -> dict[str, str]:
    """Return the environment variables by which programs get along with the filter.

    LeakSanitizer traces its own process, and where it may not, it ends a sound program with exit code 1.
    """
    return {} if "ptrace" in allowed else {"ASAN_OPTIONS": "detect_leaks=0", "LSAN_OPTIONS": "detect_leaks=0"}


@cache
def program(allowed: tuple[str, ...] = ()) -> bytes:
    """Return the filter as the kernel takes it (BPF). `allowed`: calls that are not refused after all."""
    library = _library()
    assert library is not None, why_not()
    context = library.seccomp_init(_ALLOW)
    try:
        _raise_if_failed(library.seccomp_attr_set(context, _OTHER_ARCHITECTURE, _ERRNO | errno.ENOSYS))
        for name in REFUSED:
            if name not in allowed:
                _refuse(library, context, name, errno.EPERM)
        _refuse(library, context, "clone3", errno.ENOSYS)
        for flag in (1 << bit for bit in range(32)):  # one mask for all would match only all at once
            if flag & NEW_NAMESPACES and "unshare" not in allowed:
                _refuse(library, context, "clone", errno.EPERM, _Compare(0, _MASKED_EQUAL, flag, flag))
        _refuse(library, context, "socket", errno.EAFNOSUPPORT, _Compare(0, _EQUAL, AF_VSOCK, 0))
        return _exported(library, context)
    finally:
        library.seccomp_release(context)


def _refuse(library: Any, context: int, name: str, error: int, *conditions: _Compare) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:  # else this architecture does not have it, or libseccomp is older than the call
        array = (_Compare * len(conditions))(*conditions)
        _raise_if_failed(library.seccomp_rule_add_array(context, _ERRNO | error, number, len(conditions), array))


def _raise_if_failed(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")


def _exported(library: Any, context: int) -> bytes:
    file = os.memfd_create("filter")
    try:
        _raise_if_failed(library.seccomp_export_bpf(context, file))
        os.lseek(file, 0, os.SEEK_SET)
        return os.read(file, 1 << 20)
    finally:
        os.close(file)


@cache
def _library() -> Any | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    signature = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Compare))
    library.seccomp_rule_add_array.argtypes = signature
    return library
