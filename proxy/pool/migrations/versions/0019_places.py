"""Places of tasks in their line, for runs that skip settled ones; budgets of groups."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("groups", sa.Column("place", sa.Integer(), nullable=True))
    op.add_column("groups", sa.Column("max_tokens", sa.Integer(), nullable=True))
