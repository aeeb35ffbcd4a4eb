"""Push new weights into the running engines, in one of three ways.

A push pauses every engine, so that none samples new weights while another still serves old ones; calls in flight are
retracted and continue afterwards (the engine records which version sampled each token). With pipeline ranks they end
first. While an engine's weights change, it serves the version name `<version>-loading`, which no run knows. An engine
that fails then stays paused and keeps that name: nothing that it samples passes for another version, the proxy sends it
no calls, and `push_again` repairs it. The other engines continue. Pushing the same version twice does no harm.

Where so many engines are away that too few have the weights, `push_patiently` waits for them and pushes again.

A trainer that another one has replaced stops before its next change to any engine. What it left paused or half loaded
is corrected by the new owner, which pushes to all engines at its start and to those of another version while it waits.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import MEGABYTE, progress
from trainer.config import Push
from trainer.push import colocated, disk, distributed, tensor
from trainer.push.engine_group import EngineGroup
from trainer.push.target import LOADING, PushFailed, PushTarget, nobody_else
from trainer.push.weights import Weights

WAYS: dict[str, Callable[[PushTarget, Weights], None]] = {
    "disk": disk.send,
    "tensor": tensor.send,
    "distributed": distributed.send,
}
"""push.way -> the function that brings the weights to one engine, under their version name."""
PAUSED = "-paused"
"""Suffix of the version name of an engine that has the weights of this version but failed to resume."""
LOOPBACK = ("127.", "localhost", "[::1]")
LOOK_SECONDS = 1.0
"""Seconds between two looks whether an engine that was away answers."""


@dataclass(frozen=True)
class PushResult:
    """The result of a push."""

    seconds: float = 0.0
    """How long the engines were paused."""
    ways: dict[str, str] = field(default_factory=dict)
    """Engine URL -> way, of the engines that have the weights now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engine URL -> why it does not have them."""
    notes: tuple[str, ...] = ()
    """What was done differently from the configuration, one sentence each."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that one of the engines accepts. 0: not known."""
    heads: dict[str, bool] = field(default_factory=dict)
    """Engine URL -> whether its head computes in fp32, of the engines that say so."""
    lost: frozenset[str] = frozenset()
    """URLs of the engines that failed because they did not answer."""
    waited: float = 0.0
    """Seconds before this push in which engines were away."""

    def text(self) -> str:
        """One line for the log."""
        names = sorted(set(self.ways.values()))
        without = "".join(f"; without {url}, which {reason}" for url, reason in self.failed.items())
        after = f", after {self.waited:.0f} s of waiting" if self.waited else ""
        return f"to {len(self.ways)} engines ({' '.join(names) or 'none'}), paused {self.seconds:.3f} s{after}{without}"


class EnginesAway(UserError):
    """Too few engines have the weights, and there would be enough if those in `engines` came back."""

    def __init__(self, message: str, engines: Sequence[PushTarget]):
        super().__init__(message)
        self.engines = engines


def push(weights: Weights, options: Push, demand_owner: Callable[[], None] = nobody_else) -> PushResult:
    """Bring every engine to these weights. UserError when fewer than `push.quorum` engines have them afterwards.

    `demand_owner`: raises UserError when another trainer owns the run (PushTarget).
    """
    if not options.engines:
        return PushResult()
    engines = [PushTarget(url, options, demand_owner) for url in options.engines]
    result = _push(weights, engines)
    if len(result.ways) >= options.quorum:
        return result
    reasons = "; ".join(f"engine {url} {reason}" for url, reason in result.failed.items())
    message = (
        f"{len(result.ways)} of {len(options.engines)} engines serve {weights.version} and push.quorum is "
        f"{options.quorum}: {reasons}; start these engines and then start the trainer again, which repeats the push"
    )
    failed = [engine for engine in engines if engine.url in result.failed]
    # An error of the trainer's own side of a broadcast does not tell whether the engine is there.
    there = EngineGroup(engine for engine in failed if engine.url not in result.lost).each(PushTarget.served)
    away = [engine for engine in failed if engine not in there]
    if len(result.ways) + len(away) < options.quorum:
        raise UserError(message)
    raise EnginesAway(message, away)


def push_patiently(
    weights: Weights, options: Push, demand_owner: Callable[[], None], say: Callable[[str], None]
) -> PushResult:
    """Push, and push again when engines come back whose absence left too few with the weights.

    UserError when that has taken `Push.PATIENCE_SECONDS`, or when an engine that is there refuses. `say` is called
    with one line when the waiting begins.
    """
    began, waited = time.monotonic(), 0.0
    while True:
        try:
            return replace(push(weights, options, demand_owner), waited=waited)
        except EnginesAway as error:
            away = error
        if not waited:
            names, minutes = ", ".join(engine.url for engine in away.engines), options.PATIENCE_SECONDS / 60
            say(f"waiting up to {minutes:g} minutes to push {weights.version} to engines that are away: {names}")
        there: dict[PushTarget, str] = {}
        while not there:
            time.sleep(LOOK_SECONDS)
            waited = time.monotonic() - began
            if waited > options.PATIENCE_SECONDS:
                raise UserError(f"waited {waited:.0f} s for engines that are away: {away}") from away
            demand_owner()
            there = EngineGroup(away.engines).each(PushTarget.served)


def push_again(weights: Weights, options: Push, demand_owner: Callable[[], None] = nobody_else) -> PushResult | None:
    """Push to the engines that answer but serve something else: those that failed, and those that were restarted.

    Returns None when there are none. Engines that serve these weights keep serving meanwhile.
    """
    engines = [PushTarget(url, options, demand_owner) for url in options.engines]
    served = EngineGroup(engines).each(PushTarget.served)
    outdated = [engine for engine, version in served.items() if version != weights.version]
    if not outdated:
        return None
    return _push(weights, outdated, [engine for engine in served if engine not in outdated])


def release(options: Push, demand_owner: Callable[[], None] = nobody_else) -> None:
    """Pause engines on the trainer's own devices and make them free their memory, before a step is computed there.

    UserError when one fails, since the step needs the memory.
    """
    group = EngineGroup(PushTarget(url, options, demand_owner) for url in options.engines)
    group.each(PushTarget.describe)
    group.each(colocated.release)
    for url, reason in group.failed.items():
        raise UserError(
            f"engine {url} {reason}, so its memory is not free for the step; restart this engine and the trainer"
        )


def _push(weights: Weights, engines: Sequence[PushTarget], serving: Sequence[PushTarget] = ()) -> PushResult:
    """Push to `engines`. `serving`: engines with these weights already, whose checksums the others must match."""
    size = sum(part.bytes for part in weights.tensors())  # UserError before any engine is paused, if there are none
    group = EngineGroup(engines)
    group.each(PushTarget.describe)
    ways = {engine: _choose(engine) for engine in group.engines}
    started = time.perf_counter()
    with _shown(weights, size, [way for way, _ in ways.values()]) as shown:
        # All engines are paused before the first one changes, and none resumes before the last one has changed.
        group.each(_pause)
        group.each(lambda engine: _load(engine, shown, WAYS[ways[engine][0]]))
        if serving:
            EngineGroup(serving).each(PushTarget.describe)
        group.agree(serving)
        group.each(lambda engine: _finish(engine, weights.version))
    seconds = time.perf_counter() - started if group.engines else 0.0
    notes = tuple(note for engine in group.engines if (note := ways[engine][1]))
    longest = max((engine.about.max_req_input_len for engine in group.engines), default=0)
    done = {engine.url: ways[engine][0] for engine in group.engines}
    heads = {engine.url: head for engine in group.engines if (head := engine.about.head_float32) is not None}
    return PushResult(seconds, done, group.failed, notes, longest, heads, frozenset(group.lost))


@contextmanager
def _shown(weights: Weights, size: int, ways: Sequence[str]) -> Iterator[Weights]:
    """Give the weights, which show how much of them was sent to all engines together.

    Engines that read them from a disk do not say how far they are: where all do, only the seconds are shown.
    """
    senders = sum(way != "disk" for way in ways)
    total = size * senders / MEGABYTE
    with progress(f"pushing {weights.version}", total or None, "MB" if senders else "") as sent:
        yield replace(weights, sent=sent)


def _pause(engine: PushTarget) -> None:
    """Pause an engine, ready to be loaded."""
    if engine.options.colocated:
        colocated.pause(engine)
    else:
        engine.pause()


def _load(engine: PushTarget, weights: Weights, send: Callable[[PushTarget, Weights], None]) -> None:
    """Load new weights under the version's loading name. An engine that fails stays paused, its calls aborted."""
    engine.demand_owner()
    try:
        if engine.options.colocated:
            colocated.take_back_weights(engine)
        # The name changes before the weights: a crash between the two must not leave new weights under an old name.
        engine.name(weights.version + LOADING)
        send(engine, replace(weights, version=weights.version + LOADING))
        engine.clear_store()
    except BaseException:  # also KeyboardInterrupt: the engine's weights are of no version now
        engine.abandon()
        raise


def _finish(engine: PushTarget, version: str) -> None:
    """Give the engine the version's name and resume its calls. An engine that fails here stays paused, too."""
    engine.demand_owner()
    try:
        if engine.options.colocated:
            colocated.take_back_cache(engine)
        engine.name(version)
        if (served := engine.served()) != version:
            raise PushFailed(f"serves weights {served!r} instead of {version!r}")
        _resume(engine, version)
    except PushFailed:
        engine.abandon()
        raise


def _resume(engine: PushTarget, version: str) -> None:
    """If an engine fails to resume, rename its version so that the proxy does not treat it as up to date."""
    try:
        engine.resume()
    except PushFailed:
        with suppress(PushFailed):
            engine.name(version + PAUSED)
        raise


def _choose(engine: PushTarget) -> tuple[str, str]:
    """The way to this engine, and a note when it is not the configured one."""
    way, about = engine.options.way, engine.about
    single = about.dp_size == about.pp_size == 1
    if way == "auto":
        same_machine = engine.options.colocated or (urlsplit(engine.url).netloc.startswith(LOOPBACK))
        return ("disk" if same_machine or not single else "distributed"), ""
    if way == "disk" or single:
        return way, ""
    return "disk", (
        f"engine {engine.url} has dp_size {about.dp_size} and pp_size {about.pp_size}, where SGLang 0.5.23 takes no "
        f"weights by push.way = {way}; it gets them by disk"
    )
