"""Kept sums for the account, and what warm starts learned from."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("runs", sa.Column("settled", sa.JSON(), nullable=True))
    op.add_column("groups", sa.Column("settled", sa.Integer(), nullable=True))
    rows = sa.text("settled is null")
    op.create_index("ix_groups_unsettled", "groups", ["run_id"], sqlite_where=rows, postgresql_where=rows)
    op.add_column("train_steps", sa.Column("so_far", sa.JSON(), nullable=True))
    op.create_table(
        "imitated",
        sa.Column("completion_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("rollout_id", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_imitated_run_id")),
        sa.PrimaryKeyConstraint("completion_id", name=op.f("pk_imitated")),
    )
    op.create_index(op.f("ix_imitated_run_id"), "imitated", ["run_id"])
