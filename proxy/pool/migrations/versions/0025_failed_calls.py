"""When an attempt's calls failed."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("failed_calls", sa.JSON(), nullable=True))
