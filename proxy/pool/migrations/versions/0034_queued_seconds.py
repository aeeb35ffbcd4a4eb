"""How long a call waited for a place at the proxy and for an engine."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.add_column("completions", sa.Column("queued_seconds", sa.Float(), nullable=True))
