"""What each completion was for."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("completions", sa.Column("shape", sa.JSON(), nullable=True))
    op.add_column("completions", sa.Column("label", sa.Text(), nullable=True))
