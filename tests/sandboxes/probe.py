"""What a hostile program in a sandbox tries, as a program of its own for any Python from 3.9 on.

It reads what it may know from probe.json beside it and writes one JSON line per try: its name, whether something was
reached that must not be, and what happened. The last line is the model call that must work.
"""

import ctypes
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

GIVEN = json.loads(Path(sys.argv[1]).read_text())
MODEL = (GIVEN["model_host"], GIVEN["model_port"])
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
SECONDS = 3.0
LARGEST = 1 << 20


def main() -> None:
    for name, attempt in tries():
        if not name.startswith(tuple(GIVEN["only"])) or name.startswith(tuple(GIVEN["without"])):
            continue
        began = time.monotonic()
        try:
            reached, answer = attempt()
        except (OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
            reached, answer = False, f"{type(error).__name__}: {error}"
        took = round(time.monotonic() - began, 1)
        print(json.dumps({"try": name, "reached": reached, "said": answer[:300], "seconds": took}), flush=True)
    status, _ = ask("POST", "/v1/chat/completions", key=os.environ["OPENAI_API_KEY"], body=BODY)
    print(json.dumps({"try": "a model call", "reached": status == 200, "said": str(status)}), flush=True)


Try = tuple[str, Callable[[], tuple[bool, str]]]


def tries() -> Iterator[Try]:
    yield from network()
    yield from model_channel()
    yield from keys()
    yield from files()
    yield from processes()


def network() -> Iterator[Try]:
    addresses = [*GIVEN["addresses"], *gateways(), "172.17.0.1", "host.docker.internal", "gateway.docker.internal"]
    for address in dict.fromkeys(addresses):
        for port in GIVEN["ports"]:
            yield f"tcp {address}:{port}", partial(connects, address, port)
    for port in GIVEN["ports"]:
        yield f"tcp 127.0.0.1:{port} of the host", partial(connects, "127.0.0.1", port)
        yield f"tcp [::1]:{port} of the host", partial(connects, "::1", port)
    for address, port in GIVEN["others"]:
        yield f"another container at {address}", partial(connects, address, port)
    yield "the metadata address", lambda: connects("169.254.169.254", 80)
    yield "the internet", lambda: connects("1.1.1.1", 443)
    yield "the internet over IPv6", lambda: connects("2606:4700:4700::1111", 443)
    yield "an interface with another address", other_interfaces
    yield "a name", resolves
    for server in [*nameservers(), "1.1.1.1", "127.0.0.11", *GIVEN["addresses"]]:
        yield f"a name server at {server}", partial(answers, server)
    yield "a raw socket", lambda: opens(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    yield "a packet socket", lambda: opens(socket.AF_PACKET, socket.SOCK_RAW, 0)
    yield "an abstract socket", lambda: connects_unix("\0" + GIVEN["abstract"])
    yield "vsock", opens_vsock


def model_channel() -> Iterator[Try]:
    for path in ("/health", "/metrics", "/", "/pool", "/admin", "/v1/pool", "/v1/../health", "/v1/%2e%2e/metrics"):
        for method in ("GET", "POST", "PUT", "DELETE", "CONNECT"):
            yield f"{method} {path}", partial(served, method, path)
    yield "the proxy as a forward proxy", lambda: served("GET", f"http://127.0.0.1:{GIVEN['ports'][0]}/health")


def keys() -> Iterator[Try]:
    own = os.environ["OPENAI_API_KEY"]
    for what, key in (("no key", ""), ("a key of nobody", "EMPTY"), ("a made-up key", "bf-" + "A" * 32)):
        yield what, partial(serves_key, key)
        yield what + " in the path", partial(serves_path, "/r/" + (key or "x"))
    yield "a closed attempt's key", lambda: serves_key(GIVEN["closed_key"])
    yield "a closed attempt's key in the path", lambda: serves_path("/r/" + GIVEN["closed_key"])
    for dots in ("..", "%2e%2e", "."):
        path = f"/r/{own}/{dots}/r/{GIVEN['closed_key']}"
        yield "two attempts in the path by " + dots, partial(serves_path, path)
    yield "another rollout's key", finds_key


def files() -> Iterator[Try]:
    for path in (*GIVEN["hidden"], "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
        yield "the host's " + path, partial(there, path)
    yield "a file with the verifier's content", finds_content
    yield "another socket", other_sockets
    yield "the verifier's home", lambda: (bool(os.listdir("/home/verifier")), "listed")
    yield "a file in the verifier's home", lambda: writes("/home/verifier/reward.txt")
    yield "a file beside the model's socket", lambda: writes(GIVEN["socket_directory"] + "/x")
    yield "the model's socket removed", lambda: removes(GIVEN["socket_directory"])
    yield "a block device", block_devices


def processes() -> Iterator[Try]:
    yield "a process of the host", host_processes
    yield "the first process killed", lambda: (survives_not(1), "kill -9 1")
    yield "the first process' memory", lambda: (bool(open("/proc/1/mem", "rb")), "opened")
    yield "another network namespace", enters_network
    yield "the root of the first process", lambda: (bool(os.listdir("/proc/1/root/proc/1/cwd/..")) and outside(), "/")


def gateways() -> list[str]:
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return []
    return [socket.inet_ntoa(struct.pack("<I", int(route[2], 16))) for route in routes if route[2] != "00000000"]


def nameservers() -> list[str]:
    try:
        return re.findall(r"^nameserver\s+(\S+)", Path("/etc/resolv.conf").read_text(), re.M)
    except OSError:
        return []


def connects(address: str, port: int) -> tuple[bool, str]:
    with socket.create_connection((address, port), SECONDS) as connection:
        return True, str(connection.getpeername())


def connects_unix(path: str) -> tuple[bool, str]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(path)
        return True, path


def other_interfaces() -> tuple[bool, str]:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    up = [name for name in names if Path("/sys/class/net", name, "operstate").exists() and flags_of(name) & 1]
    return bool(up), ", ".join(names)


def flags_of(name: str) -> int:
    return int(Path("/sys/class/net", name, "flags").read_text(), 16)


def resolves() -> tuple[bool, str]:
    """A name that is found, or one that fails only after a while: what waits for it would hang."""
    pause = subprocess.Popen(["sleep", "8"])
    try:
        try:
            return True, str(socket.getaddrinfo("example.com", 80))
        except OSError as error:
            late = pause.poll() is not None
            return late, ("late: " if late else "at once: ") + str(error)
    finally:
        pause.kill()
        pause.wait()


def answers(server: str) -> tuple[bool, str]:
    query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SECONDS)
        sender.connect((server, 53))
        sender.send(query)
        return True, repr(sender.recv(512)[:20])


def opens(family: int, kind: int, protocol: int) -> tuple[bool, str]:
    with socket.socket(family, kind, protocol):
        return True, "opened"


def opens_vsock() -> tuple[bool, str]:
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect((2, GIVEN["ports"][0]))
        return True, "connected"


def ask(method: str, path: str, key: str = "", body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*MODEL, timeout=60)
    try:
        headers = {"Authorization": "Bearer " + key} if key else {}
        connection.request(method, path, body=body or None, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def served(method: str, path: str) -> tuple[bool, str]:
    status, text = ask(method, path, key=os.environ["OPENAI_API_KEY"])
    return status not in (400, 404, 405), f"{status} {text[:100]!r}"


def serves_key(key: str) -> tuple[bool, str]:
    status, text = ask("POST", "/v1/chat/completions", key=key, body=BODY)
    return status not in (400, 401), f"{status} {text[:100]!r}"


def serves_path(path: str) -> tuple[bool, str]:
    status, text = ask("POST", path + "/v1/chat/completions", body=BODY)
    return status not in (400, 401), f"{status} {text[:100]!r}"


def readable() -> Iterator[tuple[str, bytes]]:
    """Whatever may be read: of every process, of the mounts, of every file where something may lie."""
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline", "mountinfo", "maps", "stack"):
            yield from content(process / name)
        for name in list_directory(process / "fd"):
            yield from content(process / "fd" / name)
    for name in ("keys", "net/unix", "net/tcp", "sysvipc/shm", "self/mountinfo"):
        yield from content(Path("/proc") / name)
    for path in everywhere():
        yield from content(path)


def everywhere() -> Iterator[Path]:
    """Every file where somebody may have left something."""
    for place in (*GIVEN["places"], os.getcwd(), GIVEN["socket_directory"]):
        for directory, below, names in os.walk(place):
            below[:] = [name for name in below if os.path.join(directory, name) not in GIVEN["skipped"]]
            yield from (Path(directory, name) for name in names)


def list_directory(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def content(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        yield str(path), os.read(file, LARGEST)
    except OSError:
        return
    finally:
        os.close(file)


class Found:
    """What one look at everything that may be read has brought. The probe knows others' secrets by their digests."""

    def __init__(self) -> None:
        own, self.files, self.own_key = os.environ["OPENAI_API_KEY"].encode(), 0, False
        self.keys: list[str] = []
        self.contents: list[str] = []
        pattern = re.compile(b"bf-[A-Za-z0-9_-]{32}|" + GIVEN["verifier_pattern"].encode())
        for path, text in readable():
            self.files += 1
            self.own_key = self.own_key or (own in text and path == f"/proc/{os.getpid()}/environ")
            for secret in set(pattern.findall(text)):
                if digest(secret.decode()) == GIVEN["other_key"]:
                    self.keys.append(path)
                if digest(secret.decode()) == GIVEN["verifier_digest"]:
                    self.contents.append(path)


@lru_cache
def found() -> Found:
    return Found()


def finds_key() -> tuple[bool, str]:
    """The key of another, wherever it stands. That the probe has found its own shows that its eyes are good."""
    return bool(
        found().keys
    ) or not found().own_key, f"{found().files} files, own key: {found().own_key}; {found().keys}"


def finds_content() -> tuple[bool, str]:
    return bool(found().contents), str(found().contents)


def other_sockets() -> tuple[bool, str]:
    paths = []
    for path in everywhere():
        try:
            if stat.S_ISSOCK(path.lstat().st_mode) and str(path.parent) != GIVEN["socket_directory"]:
                paths.append(str(path))
        except OSError:
            continue
    return bool(paths), str(paths)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def there(path: str) -> tuple[bool, str]:
    return os.path.lexists(path), "looked"


def writes(path: str) -> tuple[bool, str]:
    Path(path).write_text("1")
    return True, "written"


def removes(directory: str) -> tuple[bool, str]:
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    return True, "removed"


def block_devices() -> tuple[bool, str]:
    devices = [name for name in os.listdir("/dev") if stat.S_ISBLK(os.lstat("/dev/" + name).st_mode)]
    return bool(devices), str(devices)


def host_processes() -> tuple[bool, str]:
    """Processes that are not of this sandbox: more than ours, the first, and what keeps the sandbox."""
    names = [process.name for process in Path("/proc").glob("[0-9]*")]
    return len(names) > 12 or GIVEN["host_pid_namespace"] == os.readlink("/proc/self/ns/pid"), str(len(names))


def survives_not(pid: int) -> bool:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except PermissionError:
            pass
    return not Path("/proc", str(pid)).exists()


def enters_network() -> tuple[bool, str]:
    libc = ctypes.CDLL(None, use_errno=True)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            file = os.open(process / "ns" / "net", os.O_RDONLY)
        except OSError:
            continue
        if os.readlink(f"/proc/self/fd/{file}") != os.readlink("/proc/self/ns/net"):
            return libc.setns(file, 0) == 0, str(process)
    return False, "none other"


def outside() -> bool:
    return os.stat("/proc/1/root").st_ino != os.stat("/").st_ino


if __name__ == "__main__":
    main()
