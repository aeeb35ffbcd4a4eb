"""Reasons why something is not trained become an enum and a detail (proxy/pool/untrained.py).

Texts that were stored before are mapped here and nowhere else.
"""

import json
import re
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

TEXTS = (
    (r"abandoned in transport", "abandoned"),
    (r"the engine named the weight version of the (.*)", "version_missing"),
    (r"constrained", "constrained"),
    (r"sampled with (.*), not from the training distribution", "sampling_parameters"),
    (r"text only: .*\(it (ended by .*)\)", "text_only"),
    (r"label (.*)", "label"),
    (r"logprobs are missing", "logprobs_missing"),
    (r"stored tokens do not match their checksum", "checksum"),
    (r"finish reason (.*)", "unfinished"),
    (r"another version", "other_version"),
    (r"logprob is not finite", "logprob_not_finite"),
    (r"(?:rollout: )?no reward", "no_reward"),
    (r"(?:rollout: )?no completion of a version of this run", "no_version"),
    (r"rollout: (.*)", "rollout_failed"),
    (r"truncated", "truncated"),
    (r"negative advantage", "negative_advantage"),
    (r"stale(?:: (.*))?", "stale"),
    (r"filtered: (.*)", "group_filtered"),
    (r"(\d+ of \d+ rollouts (?:have a reward|are usable).*)", "too_few_valid"),
    (r"too few rollouts of the group have a verdict", "too_few_valid"),
    (r"all rewards of the group are equal", "equal_rewards"),
)
"""Pattern of an old text -> its reason; the group of the pattern is the detail."""
COUNTS = ("excluded_tokens", "masked_tokens")
"""Metrics of a train step that count tokens by reason."""


def upgrade() -> None:
    _split("completions", "untrainable", "untrainable_detail")
    _split("groups", "reason", "detail")
    _rewrite_metrics()


def from_text(text: str) -> tuple[str, str | None]:
    """The reason and detail of an old text; whatever is not in the list was the words of a failed engine."""
    for pattern, reason in TEXTS:
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return reason, match[1] if match.re.groups else None
    return "engine_failed", text


def _split(table: str, column: str, detail: str) -> None:
    op.execute(f"alter table {table} rename column {column} to {detail}")  # cheap: neither database copies the rows
    op.add_column(table, sa.Column(column, sa.Text(), nullable=True))
    connection = op.get_bind()
    rows = connection.execute(sa.text(f"select id, {detail} from {table} where {detail} is not null")).all()
    values: list[dict[str, Any]] = []
    for row in rows:
        reason, rest = from_text(row[1])
        values.append({"id": row.id, "reason": reason, "rest": rest})
    if values:
        statement = f"update {table} set {column} = :reason, {detail} = :rest where id = :id"
        connection.execute(sa.text(statement), values)


def _rewrite_metrics() -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.text("select id, cast(metrics as text) from train_steps")).all():
        metrics = json.loads(row[1])
        for name in COUNTS:
            if metrics.get(name):
                counts: dict[str, int] = {}
                for text, count in metrics[name].items():
                    reason, detail = from_text(text)
                    key = f"{reason}: {detail}" if detail else reason
                    counts[key] = counts.get(key, 0) + count
                metrics[name] = counts
        values = {"id": row.id, "metrics": metrics}
        statement = sa.text("update train_steps set metrics = :metrics where id = :id")
        connection.execute(statement.bindparams(sa.bindparam("metrics", type_=sa.JSON())), values)
