"""What an attempt sampled, in figures: kept on its rollout's row, so that nobody reads completions to count them."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, select, update

from proxy.pool.schema import SAMPLED_TOKENS, attempts, completions, rollouts

ATTEMPTS_PER_QUERY = 500


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
    columns = (completions.c.id, completions.c.versions, completions.c.untrainable, SAMPLED_TOKENS.label("tokens"))
    query = select(attempts.c.id.label("attempt"), *columns).outerjoin_from(attempts, completions)
    if closed:
        query = query.where(attempts.c.closed_at.is_not(None))
    ids, counted = sorted(attempt_ids), dict[int, Counts]()
    for start in range(0, len(ids), ATTEMPTS_PER_QUERY):
        for row in connection.execute(query.where(attempts.c.id.in_(ids[start : start + ATTEMPTS_PER_QUERY]))):
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


def keep_missing(connection: Connection, rollout_of: Mapping[int, int]) -> None:
    """Write the figures of attempts to their rollouts (attempt id -> rollout id) that have none yet."""
    for attempt_id, counts in count(connection, rollout_of, closed=True).items():
        this = (rollouts.c.id == rollout_of[attempt_id]) & (rollouts.c.attempt_id == attempt_id)
        connection.execute(update(rollouts).where(this).values(asdict(counts)))
