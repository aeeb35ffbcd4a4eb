"""Figures of a rollout's attempt, and indexes for what is asked again and again of a large pool."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("completions", sa.Integer(), nullable=True))
    op.add_column("rollouts", sa.Column("sampled_tokens", sa.Integer(), nullable=True))
    op.add_column("rollouts", sa.Column("trainable_tokens", sa.Integer(), nullable=True))
    op.add_column("rollouts", sa.Column("versions", sa.JSON(), nullable=True))
    op.drop_index(op.f("ix_groups_run_id_state"), "groups")
    op.create_index(op.f("ix_groups_run_id_state_purpose"), "groups", ["run_id", "state", "purpose"])
    op.create_index(op.f("ix_groups_run_id_finished_at_id"), "groups", ["run_id", "finished_at", "id"])
    op.create_index(op.f("ix_groups_task_id"), "groups", ["task_id"])
    for column in ("step", "failure", "replaces"):
        rows = sa.text(f"{column} is not null")
        op.create_index(f"ix_groups_{column}", "groups", ["run_id", column], sqlite_where=rows, postgresql_where=rows)
