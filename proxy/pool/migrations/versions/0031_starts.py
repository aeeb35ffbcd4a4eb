"""The recorded attempt that a group's attempts begin with, and what came of it."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    op.add_column("groups", sa.Column("start_attempt_id", sa.Integer(), nullable=True))
    op.add_column("groups", sa.Column("start_turns", sa.Integer(), nullable=True))
    op.add_column("groups", sa.Column("start_dated_at", sa.Float(), nullable=True))
    rows = sa.text("start_attempt_id is not null")
    columns = ["run_id", "start_attempt_id"]
    op.create_index("ix_groups_start_attempt_id", "groups", columns, sqlite_where=rows, postgresql_where=rows)
    op.add_column("attempts", sa.Column("replayed_tokens", sa.Integer(), nullable=True))
    op.add_column("attempts", sa.Column("differed", sa.Text(), nullable=True))
