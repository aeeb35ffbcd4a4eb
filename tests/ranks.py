"""The processes below `trainer launch`, from /proc: to be killed, and to be seen gone."""

from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(launcher: int) -> list[int]:
    """The ranks below torchrun, by their number."""
    [torchrun] = children(launcher)
    return sorted(children(torchrun), key=_rank)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _rank(pid: int) -> int:
    environment = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return int(environment["RANK"])
