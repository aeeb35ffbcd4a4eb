"""What a train step takes from a run's queue, so that a reader of the pool sees the window."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.add_column("runs", sa.Column("lease_groups", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("lease_window", sa.Integer(), nullable=True))
