"""The engines of one push, at work side by side: what one fails is its own matter, the others go on without it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer.push.target import PushFailed, PushTarget

T = TypeVar("T")


class EngineGroup:
    """`engines` are still with it; `failed` says of the others, by address, why they are not."""

    def __init__(self, engines: Iterable[PushTarget]):
        self.engines = list(engines)
        self.failed: dict[str, str] = {}

    def each(self, do: Callable[[PushTarget], T]) -> dict[PushTarget, T]:
        """`do` at every engine at once. One that fails leaves; any other error ends the push when all are done."""
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
        return results

    def leave(self, engine: PushTarget, reason: str) -> None:
        self.engines.remove(engine)
        self.failed[engine.url] = reason

    def agree(self, standing: Sequence[PushTarget]) -> None:
        """Engines that split their weights in the same way must have the same checksums; those that differ leave.

        What they differ from are engines that serve this version already (`standing`) if there are such, else what most
        of them have, which is what the first has when it is a tie.
        """
        shapes = Counter(_shape(engine) for engine in (*self.engines, *standing))
        known = EngineGroup(engine for engine in standing if shapes[_shape(engine)] > 1).each(PushTarget.checksums)
        found = self.each(lambda engine: engine.checksums() if shapes[_shape(engine)] > 1 else ())
        for engine, sums in found.items():
            peers = _of_shape(engine, known) or _of_shape(engine, found)
            usual = Counter(peers).most_common(1)[0][0]
            if sums != usual:
                engine.abandon()
                self.leave(engine, f"has other weights than its peers (checksums {_short(sums)}, not {_short(usual)})")


def _of_shape(engine: PushTarget, sums: dict[PushTarget, tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [theirs for other, theirs in sums.items() if _shape(other) == _shape(engine)]


def _shape(engine: PushTarget) -> tuple[int, int, str | None]:
    return engine.about.tp_size, engine.about.pp_size, engine.about.device


def _short(sums: tuple[str, ...]) -> str:
    return " ".join(one[:8] for one in sums) or "none"
