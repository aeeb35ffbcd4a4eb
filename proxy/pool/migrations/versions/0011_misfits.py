"""How an answer misses the form that its request prescribes."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("completions", sa.Column("misfit", sa.Text(), nullable=True))
