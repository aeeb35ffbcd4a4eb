"""The account of a run: where every sampled token is.

Each token is trained by one step that counts, or left out for one reason, or still on its way to a step. Steps keep
what they did with the tokens of their groups (proxy/pool/training/fates.py), attempts how many tokens they sampled, and
runs the sums of groups that have come to rest (settled.py there). So no completion is read but those of open attempts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.counts import REPLAYED_TOKENS
from proxy.pool.schema import attempts, completions, fates, groups, rollouts
from proxy.pool.training.fates import Tally, added
from proxy.pool.training.imitation import imitation
from proxy.pool.training.places import CALLED_OFF, CONSUMED, placed, tallies
from proxy.pool.training.settled import UNSETTLED, kept, of_steps
from proxy.pool.untrained import UntrainedReason, heading

TRAINED = "trained"
WAITING = ("sampling", "queued", "leased", "reopened")
"""Places of tokens on the way. sampling: their rollout has no outcome yet. queued: no step has their group. leased: the
group's step is not published. reopened: the step was rolled back, and the group is not trained again yet."""
DECILES = 10
IMITATED = "of these, imitated"
REPLAYED = "beside these, replayed"


@dataclass(frozen=True)
class Account:
    """Where the sampled tokens of a run are at one moment."""

    sampled: int
    trained: Tally
    left_out: dict[str, Tally]
    """By reason (proxy/pool/untrained.py)."""
    waiting: dict[str, Tally]
    """By place (WAITING)."""
    imitated: Tally = Tally()
    """What warm starts learned from. These tokens stand in the other places too."""
    replayed: Tally = Tally()
    """Answers of recorded attempts with which attempts of the run begin (proxy/pool/rollouts/starts.py). They were
    sampled where they were recorded, so they are in none of the other sums."""

    @property
    def unaccounted(self) -> int:
        """Sampled tokens that are in none of these places: 0, or rows are missing."""
        placed = (self.trained, *self.left_out.values(), *self.waiting.values())
        return self.sampled - sum(tally.tokens for tally in placed)


def account(pool: Pool, run_id: int, *, replays: bool = True) -> Account:
    """Return the account of a run. Without `replays`, it reads no more than the groups that have not settled."""
    with pool.read() as connection:
        places = added(kept(connection, run_id), tallies(connection, run_id, UNSETTLED))
        steps = of_steps(connection, run_id)
        learned = imitation(connection, run_id)
        replayed = _replayed(connection, run_id) if replays else Tally()
    left_out = defaultdict(Tally, steps.left_out)
    for reason in (UntrainedReason.GIVEN, *CALLED_OFF.values()):  # not sampled; counted by the attempts
        left_out.pop(reason, None)
    sampled = sum(tally.tokens for tally in places.values())
    waiting = {place: places.pop(place) for place in WAITING if place in places}
    places.pop(CONSUMED, None)
    for reason, tally in places.items():
        left_out[reason] += tally
    return Account(sampled, steps.trained, dict(sorted(left_out.items())), waiting, learned, replayed)


def _replayed(connection: Connection, run_id: int) -> Tally:
    """Sum up the answers that the attempts of a run have replayed."""
    tokens = func.coalesce(attempts.c.replayed_tokens, REPLAYED_TOKENS).label("tokens")
    query = (
        select(groups.c.id.label("group_id"), rollouts.c.id.label("rollout_id"), tokens)
        .join_from(groups, rollouts)
        .join(attempts, attempts.c.rollout_id == rollouts.c.id)
        .where(groups.c.run_id == run_id, groups.c.start_attempt_id.is_not(None))
        .subquery()
    )
    counts = [func.count(query.c[name].distinct()) for name in ("group_id", "rollout_id")]
    sums = select(*counts, func.coalesce(func.sum(query.c.tokens), 0)).where(query.c.tokens > 0)
    return Tally(*map(int, connection.execute(sums).one()))


def place_of(connection: Connection, attempt_id: int) -> str | None:
    """Return the place of an attempt's tokens; CONSUMED: its step tells that of each. None: it is of no run."""
    run_id = connection.scalar(select(attempts.c.run_id).where(attempts.c.id == attempt_id))
    return None if run_id is None else connection.scalar(placed(run_id).where(attempts.c.id == attempt_id))


def shares_by_length(pool: Pool, run_id: int) -> dict[str, list[float]]:
    """Return, for each reason and for what is trained, its share of the tokens by the decile of their rollout's length.

    The shortest rollouts come first. Reads the fates of the completions that the pool still has; rollouts that wait, or
    that have left it, are not counted. Empty below ten rollouts.
    """
    inner = placed(run_id).subquery()
    grouped = (inner.c.rollout_id, inner.c.place)
    query = select(*grouped, func.sum(inner.c.tokens)).where(inner.c.finished_at.is_not(None)).group_by(*grouped)
    taken = (
        select(rollouts.c.id, fates.c.trained, fates.c.left_out)
        .join_from(groups, rollouts)
        .join(completions, completions.c.attempt_id == rollouts.c.attempt_id)
        .join(fates, fates.c.completion_id == completions.c.id)
        .where(groups.c.run_id == run_id, groups.c.state == "CONSUMED")
    )
    parts: dict[int, Counter[str]] = defaultdict(Counter)
    with pool.read() as connection:
        for rollout_id, place, tokens in connection.execute(query):
            parts[rollout_id][place] += int(tokens)
        for rollout_id, trained, left_out in connection.execute(taken):
            if CONSUMED in parts[rollout_id]:
                for text, tokens in ((TRAINED, trained), *left_out.items()):
                    name = heading(text)
                    counted = tokens if name != UntrainedReason.GIVEN else 0
                    parts[rollout_id][name] += counted
                    parts[rollout_id][CONSUMED] -= counted
    return by_decile([part for part in parts.values() if not any(part[place] for place in (CONSUMED, *WAITING))])


def by_decile(parts: list[Counter[str]]) -> dict[str, list[float]]:
    """Return the shares of rollouts' tokens by the decile of their length. `parts`: name -> tokens, of each rollout."""
    if len(parts) < DECILES:
        return {}
    ordered = sorted(parts, key=Counter.total)
    edges = [len(ordered) * n // DECILES for n in range(DECILES + 1)]
    deciles = [sum(ordered[start:end], Counter()) for start, end in zip(edges, edges[1:], strict=False)]
    names = sorted({name for part in parts for name, tokens in part.items() if tokens})
    return {name: [part[name] / max(1, part.total()) for part in deciles] for name in names}


def account_lines(now: Account) -> list[str]:
    """Return an account as lines of a table."""
    rows = [(TRAINED, now.trained)]
    rows += [(f"left out: {reason}", tally) for reason, tally in now.left_out.items()]
    rows += [(f"waiting: {place}", tally) for place, tally in now.waiting.items()]
    beside = [(name, tally) for name, tally in ((IMITATED, now.imitated), (REPLAYED, now.replayed)) if tally.tokens]
    width = max(len(name) for name, _ in (*rows, *beside, (IMITATED, None)))
    lines = [f"{'tokens':{width}} {'groups':>9} {'rollouts':>9} {'tokens':>12} {'share':>7}"]
    for name, tally in rows + beside:
        share = tally.tokens / max(1, now.sampled)
        lines.append(f"{name:{width}} {tally.groups:9} {tally.rollouts:9} {tally.tokens:12} {share:7.1%}")
    for name, tokens in (("unaccounted", now.unaccounted), ("sampled", now.sampled)):
        lines.append(f"{name:{width}} {'':9} {'':9} {tokens:12}")
    return lines


def length_lines(shares: Mapping[str, list[float]]) -> list[str]:
    """Return the shares by length as lines of a table; none without shares."""
    if not shares:
        return []
    width = max(map(len, shares))
    title = "share of the tokens by the length of their rollout, from the shortest tenth to the longest:"
    return [title, *(f"{name:{width}} {' '.join(f'{one:5.0%}' for one in parts)}" for name, parts in shares.items())]
