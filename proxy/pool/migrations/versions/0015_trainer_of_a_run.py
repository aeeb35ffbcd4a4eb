"""Which trainer works at a run."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("runs", sa.Column("trainer", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("trainer_seen_at", sa.Float(), nullable=True))
