"""The engines of one push, each in its own thread. An engine that fails leaves the group; the others continue."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer.push.target import PushFailed, PushTarget

T = TypeVar("T")


class EngineGroup:
    """`engines` are still in the group; `failed` has the reason of each engine that left, by its URL, and `lost` the
    URLs of those that left because they did not answer."""

    def __init__(self, engines: Iterable[PushTarget]):
        self.engines = list(engines)
        self.failed: dict[str, str] = {}
        self.lost: set[str] = set()

    def each(self, do: Callable[[PushTarget], T]) -> dict[PushTarget, T]:
        """Run `do` for every engine at once, each in its own thread, and return the results.

        An engine with PushFailed leaves the group; any other error is raised when all threads are done. The group
        changes only in the caller's thread, so it needs no lock.
        """
        if not self.engines:
            return {}
        with ThreadPoolExecutor(len(self.engines)) as threads:
            running = {engine: threads.submit(do, engine) for engine in self.engines}
        results = {}
        for engine, work in running.items():
            try:
                results[engine] = work.result()
            except PushFailed as error:
                self.leave(engine, str(error))
                if error.lost:
                    self.lost.add(engine.url)
        return results

    def leave(self, engine: PushTarget, reason: str) -> None:
        """Remove an engine and keep the reason."""
        self.engines.remove(engine)
        self.failed[engine.url] = reason

    def agree(self, serving: Sequence[PushTarget]) -> None:
        """Compare checksums between engines that split their weights in the same way. Engines that differ leave the
        group.

        The reference is what engines that serve this version already (`serving`) have, if there are such; else what
        most of the group have, or in a tie, what the first has.
        """
        splits = Counter(_split(engine) for engine in (*self.engines, *serving))
        serving_checksums = EngineGroup(engine for engine in serving if splits[_split(engine)] > 1).each(
            PushTarget.checksums
        )
        checksums = self.each(lambda engine: engine.checksums() if splits[_split(engine)] > 1 else ())
        for engine, sums in checksums.items():
            peers = _peers(engine, serving_checksums) or _peers(engine, checksums)
            reference = Counter(peers).most_common(1)[0][0]
            if sums != reference:
                engine.abandon()
                self.leave(
                    engine, f"has other weights than its peers (checksums {_short(sums)}, not {_short(reference)})"
                )


def _peers(engine: PushTarget, sums: dict[PushTarget, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The checksums of engines that split their weights as `engine` does."""
    return [theirs for other, theirs in sums.items() if _split(other) == _split(engine)]


def _split(engine: PushTarget) -> tuple[int, int, str | None]:
    """How an engine splits its weights; checksums are comparable only within the same split."""
    return engine.about.tp_size, engine.about.pp_size, engine.about.device


def _short(sums: tuple[str, ...]) -> str:
    """The beginnings of checksums, for messages."""
    return " ".join(one[:8] for one in sums) or "none"
