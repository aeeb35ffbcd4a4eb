"""Which harness works at a run."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("owner_seen_at", sa.Float(), nullable=True))
