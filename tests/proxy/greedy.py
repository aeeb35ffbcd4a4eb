"""A client that opens connections and ends no request: PORT COUNT BODY HEAD. It stays until its input ends.

On each connection it sends the head and so many bytes of a body. What the proxy closes stays closed.
"""

import contextlib
import socket
import sys

CHUNK = bytes(1 << 18)


def main() -> None:
    port, count, body, head = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=120)
            opened.append(one)
            one.sendall(head.encode())
            for start in range(0, body, len(CHUNK)):
                one.sendall(CHUNK[: body - start])
    print(len(opened), flush=True)
    sys.stdin.read()


main()
