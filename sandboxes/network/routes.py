"""Takes routes away from a network name space: to its neighbours, to private ranges and to metadata services.

A program of its own, `python -I -S -c SOURCE FORBIDDEN REACH` with networks separated by commas, for a container that
shares the network of a sandbox and may change it (NET_ADMIN), which the sandbox may not. Every route to a neighbour
goes, the default route stays, and what is forbidden gets a route that refuses. `REACH` names what is allowed all the
same. Name servers stay reachable, unless they are a metadata service.

Left out: a program that binds a UDP packet to the interface (IP_PKTINFO) gets past routes, to neighbours only.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Union

Net = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]  # noqa: UP007 (Python 3.9)
METADATA = ("169.254.0.0/16", "fd00:ec2::254/128")
FORBIDDEN = (
    *METADATA,
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "240.0.0.0/4"),
    *("fc00::/7", "fec0::/10", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"),
)
"""Ranges that are private or lead to private ones (NAT64, 6to4), and where clouds keep their metadata."""
IPV6_LINKS = ipaddress.ip_network("fe80::/64")
"""Each interface has these addresses, and IPv6 does not work without them."""
NEW, DELETE, DUMP = 24, 25, 26
REQUEST, ACK, REPLACE, ALL, CREATE = 0x1, 0x4, 0x100, 0x300, 0x400
UNICAST, PROHIBIT = 1, 8
MAIN, STATIC, ON_LINK = 254, 4, 4
DESTINATION, INTERFACE, GATEWAY, METRIC = 1, 4, 5, 6
UNIVERSE, LINK, ANY_SCOPE = 0, 253, 255
MISSING = (3, 2, 95, 97)
"""Errors of an address family that the name space does not have: ESRCH, ENOENT, EOPNOTSUPP, EAFNOSUPPORT."""


class Routes:
    """The main routes of one address family."""

    def __init__(self, family: int):
        self.family = family
        self.size = 4 if family == socket.AF_INET else 16
        self.netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def ask(
        self,
        kind: int,
        flags: int,
        network: "Net | None" = None,
        *,
        scope: int = UNIVERSE,
        route: int = UNICAST,
        gateway: "bytes | None" = None,
        interface: "bytes | None" = None,
        metric: "bytes | None" = None,
    ) -> "list[bytes]":
        """Send one request and return the payloads of its answers. OSError when it is refused."""
        prefix = 0 if network is None else network.prefixlen
        link = ON_LINK if gateway is not None else 0
        origin = STATIC if kind == NEW else 0
        message = struct.pack("=BBBBBBBBI", self.family, prefix, 0, 0, MAIN, origin, scope, route, link)
        for name, value in (
            (DESTINATION, None if network is None or not prefix else network.network_address.packed),
            (GATEWAY, gateway),
            (INTERFACE, interface),
            (METRIC, metric),
        ):
            if value is not None:
                message += struct.pack("=HH", 4 + len(value), name) + value
        self.netlink.send(struct.pack("=IHHII", 16 + len(message), kind, REQUEST | flags, 1, 0) + message)
        answers: list[bytes] = []
        while True:
            data = self.netlink.recv(1 << 16)
            while data:
                length, what = struct.unpack_from("=IH", data)
                payload, data = data[16:length], data[(length + 3) & ~3 :]
                if what == 2:  # an error, or none
                    code = -struct.unpack_from("=i", payload)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    return answers
                if what == 3:  # the end of a list
                    return answers
                answers.append(payload)

    def all(self) -> "Iterator[tuple[Net, dict[int, bytes], int]]":
        """Yield the network, the attributes and the kind of each main route."""
        for payload in self.ask(DUMP, ALL):
            family, prefix, _, _, table, _, _, kind, _ = struct.unpack_from("=BBBBBBBBI", payload)
            attributes: dict[int, bytes] = {}
            rest = payload[12:]
            while len(rest) >= 4:
                length, name = struct.unpack_from("=HH", rest)
                attributes[name & 0x3FFF] = rest[4:length]
                rest = rest[(length + 3) & ~3 :]
            if table == MAIN and family == self.family:
                address = attributes.get(DESTINATION, bytes(self.size))
                yield ipaddress.ip_network((address, prefix)), attributes, kind

    def restrict(self, forbidden: "Sequence[Net]", reach: "Sequence[Net]") -> None:
        """Keep the default route, take the others away, and refuse what is forbidden."""
        routes = [one for one in self.all() if not one[0].is_multicast and one[0] != IPV6_LINKS]
        ways = [attributes for network, attributes, _ in routes if network.prefixlen == 0 and GATEWAY in attributes]
        near = [network for network, attributes, _ in routes if network.prefixlen and GATEWAY not in attributes]
        put = ACK | CREATE | REPLACE
        for way in ways[:1]:  # it no longer needs a route to its gateway
            self.ask(NEW, put, gateway=way[GATEWAY], interface=way[INTERFACE], metric=way.get(METRIC))
        for network in near:
            self.ask(DELETE, ACK, network, scope=ANY_SCOPE, route=0)
        for network in (*forbidden, *near):
            if self.has(network) and network not in reach:
                self.ask(NEW, put, network, route=PROHIBIT)
        for way in ways[:1]:
            for network in filter(self.has, reach):
                if any(network.subnet_of(neighbours) for neighbours in near):  # type: ignore[arg-type]
                    self.ask(NEW, put, network, scope=LINK, interface=way[INTERFACE])
                else:
                    self.ask(NEW, put, network, gateway=way[GATEWAY], interface=way[INTERFACE])

    def has(self, network: "Net") -> bool:
        return self.family == (socket.AF_INET if network.version == 4 else socket.AF_INET6)


def name_servers() -> "Iterator[Net]":
    """Yield the addresses of the name servers that are no metadata service."""
    metadata = [ipaddress.ip_network(network) for network in METADATA]
    with open("/etc/resolv.conf") as file:
        for line in file:
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver":
                address = ipaddress.ip_network(words[1].partition("%")[0])
                if not any(address.overlaps(one) for one in metadata):
                    yield address


def main() -> None:
    forbidden, reach = ([ipaddress.ip_network(one) for one in text.split(",") if one] for text in sys.argv[1:3])
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            Routes(family).restrict(forbidden, [*reach, *name_servers()])
        except OSError as error:
            if family == socket.AF_INET or error.errno not in MISSING:
                raise
    print("restricted")


if __name__ == "__main__":
    main()
