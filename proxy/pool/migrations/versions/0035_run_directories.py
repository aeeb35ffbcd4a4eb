"""Where a run's harness keeps its files, so that a reader of the pool finds its logs."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    op.add_column("runs", sa.Column("directory", sa.Text(), nullable=True))
