"""The experts that a mixture of experts chose for each token, as its engine reports them. The trainer replays them.

A completion holds the choices of its new tokens only; those before `start` are in the rows that it continues. The last
sampled token has none, because no engine has computed it yet; if it becomes part of a later prompt, that completion has
its choice. Not here: joining the rows of a path (trainer/data/routed_experts.py), and weights of the choices.
"""

import struct
from dataclasses import dataclass

HEADER = struct.Struct("<IHBB")
"""First position, layers, experts per token and layer, bytes of an expert's number."""
INT32 = 4


@dataclass(frozen=True)
class RoutedExperts:
    """The choices for the positions [start, end) of a completion's path."""

    start: int
    layers: int
    """All layers of the model; engines report expert 0 in layers without a mixture."""
    top_k: int
    width: int
    """Bytes per expert number: 1 for up to 256 experts, else 2."""
    ids: bytes
    """[end - start, layers, top_k] little-endian."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // (self.layers * self.top_k * self.width)

    def since(self, start: int) -> "RoutedExperts":
        """Return the choices from position `start` on, which lies in [self.start, self.end]."""
        skipped = (start - self.start) * self.layers * self.top_k * self.width
        return RoutedExperts(start, self.layers, self.top_k, self.width, self.ids[skipped:])

    def until(self, end: int) -> "RoutedExperts":
        """Return the choices before position `end`, which lies in [self.start, self.end]."""
        kept = (end - self.start) * self.layers * self.top_k * self.width
        return RoutedExperts(self.start, self.layers, self.top_k, self.width, self.ids[:kept])


def narrowed(numbers: bytes, start: int, layers: int, top_k: int) -> RoutedExperts:
    """Read an engine's int32 numbers. ValueError for numbers that are no experts, or for incomplete positions."""
    if len(numbers) % (INT32 * layers * top_k):
        raise ValueError(f"{len(numbers)} bytes are no int32 [positions, {layers}, {top_k}]")
    first, second, *rest = (numbers[byte::INT32] for byte in range(INT32))
    if any(part.strip(b"\0") for part in rest):
        raise ValueError("a number is negative or above 65535")
    if not second.strip(b"\0"):
        return RoutedExperts(start, layers, top_k, 1, first)
    both = bytearray(2 * len(first))
    both[0::2], both[1::2] = first, second
    return RoutedExperts(start, layers, top_k, 2, bytes(both))


def joined(first: RoutedExperts, second: RoutedExperts) -> RoutedExperts:
    """Join the choices of neighbouring positions, of which `second` has the later ones."""
    width = max(first.width, second.width)
    ids = b"".join(part.ids if part.width == width else _widened(part.ids) for part in (first, second))
    return RoutedExperts(first.start, first.layers, first.top_k, width, ids)


def _widened(narrow: bytes) -> bytes:
    """Write numbers of one byte in two."""
    both = bytearray(2 * len(narrow))
    both[0::2] = narrow
    return bytes(both)


def known_after(experts: RoutedExperts | None, known: int) -> int:
    """Return how many tokens from the beginning of a path have recorded choices; `known`: those of the shared part."""
    return experts.end if experts is not None and experts.start <= known else known


def pack(experts: RoutedExperts) -> bytes:
    """Encode choices for storage."""
    return HEADER.pack(experts.start, experts.layers, experts.top_k, experts.width) + experts.ids


def unpack(stored: bytes) -> RoutedExperts:
    """Decode what `pack` encoded; ValueError for anything else."""
    try:
        start, layers, top_k, width = HEADER.unpack_from(stored)
    except struct.error as error:
        raise ValueError(f"{len(stored)} bytes hold no header") from error
    experts = RoutedExperts(start, layers, top_k, width, stored[HEADER.size :])
    if width not in (1, 2) or not layers * top_k or len(experts.ids) % (layers * top_k * width):
        raise ValueError(
            f"{len(experts.ids)} bytes are no positions of {layers} layers, {top_k} experts, {width} bytes"
        )
    return experts
