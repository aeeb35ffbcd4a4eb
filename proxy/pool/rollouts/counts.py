"""What an attempt sampled, in figures: kept on its rollout's row, so that nobody reads completions to count them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from proxy.pool.schema import SAMPLED_TOKENS, TOKENS, attempts, completions, rollouts
from proxy.pool.untrained import UntrainedReason

ATTEMPTS_PER_QUERY = 500
_own = select(func.coalesce(func.sum(SAMPLED_TOKENS), 0)).where(completions.c.attempt_id == attempts.c.id)
OWN_TOKENS = _own.correlate(attempts).scalar_subquery()
"""Number of tokens that the attempt of a query's row has sampled."""
_replayed = select(func.coalesce(func.sum(TOKENS), 0)).where(
    completions.c.attempt_id == attempts.c.id, completions.c.untrainable == UntrainedReason.REPLAYED
)
REPLAYED_TOKENS = _replayed.correlate(attempts).scalar_subquery()
"""Number of tokens of its answers that were recorded in another attempt."""
# Built once, as CALLS_SEEN in proxy/pool/rollouts/budgets.py is. `some`: ids of attempts.
_some = attempts.c.id.in_(bindparam("some", expanding=True))
_figures = (completions.c.id, completions.c.versions, completions.c.untrainable, SAMPLED_TOKENS.label("tokens"))
COMPLETIONS_OF = select(attempts.c.id.label("attempt"), *_figures).outerjoin_from(attempts, completions).where(_some)
COMPLETIONS_OF_CLOSED = COMPLETIONS_OF.where(attempts.c.closed_at.is_not(None))
KEEP_TOKENS = update(attempts).where(_some).values(sampled_tokens=OWN_TOKENS, replayed_tokens=REPLAYED_TOKENS)


@dataclass
class Counts:
    """Figures of one attempt."""

    completions: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    """The sampled tokens of trainable completions."""
    versions: list[str] = field(default_factory=list)
    """Names of the weights that sampled trainable tokens."""


def count(connection: Connection, attempt_ids: Collection[int], closed: bool = False) -> dict[int, Counts]:
    """Count the completions of each of these attempts; with `closed`, only of those that have ended."""
    query = COMPLETIONS_OF_CLOSED if closed else COMPLETIONS_OF
    ids, counted = sorted(attempt_ids), dict[int, Counts]()
    for start in range(0, len(ids), ATTEMPTS_PER_QUERY):
        for row in connection.execute(query, {"some": ids[start : start + ATTEMPTS_PER_QUERY]}):
            counts = counted.setdefault(row.attempt, Counts())
            if row.id is None:  # the attempt has no completion
                continue
            counts.completions += 1
            counts.sampled_tokens += row.tokens
            if row.untrainable is None:
                counts.trainable_tokens += row.tokens
                counts.versions = sorted({*counts.versions, *(version for version, _, _ in row.versions)})
    return counted


def final_counts(connection: Connection, attempt_id: int | None) -> dict[str, Any]:
    """Return the columns of a rollout whose outcome this attempt gave; none while completions can still join it."""
    counted = {} if attempt_id is None else count(connection, [attempt_id], closed=True)
    return asdict(counted[attempt_id]) if attempt_id in counted else {}


def keep_tokens(connection: Connection, attempt_ids: Sequence[int]) -> None:
    """Write the sampled and the replayed tokens of attempts that this transaction has closed: no further ones come."""
    for start in range(0, len(attempt_ids), ATTEMPTS_PER_QUERY):
        connection.execute(KEEP_TOKENS, {"some": attempt_ids[start : start + ATTEMPTS_PER_QUERY]})


def keep_missing(connection: Connection, rollout_of: Mapping[int, int]) -> None:
    """Write the figures of attempts to their rollouts (attempt id -> rollout id) that have none yet."""
    for attempt_id, counts in count(connection, rollout_of, closed=True).items():
        this = (rollouts.c.id == rollout_of[attempt_id]) & (rollouts.c.attempt_id == attempt_id)
        connection.execute(update(rollouts).where(this).values(asdict(counts)))
