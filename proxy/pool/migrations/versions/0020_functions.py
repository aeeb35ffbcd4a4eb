"""What a user's function said about the rollouts of a lease."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("groups", sa.Column("function", sa.Text(), nullable=True))
    op.add_column("rollouts", sa.Column("weight", sa.Float(), nullable=True))
    op.add_column("rollouts", sa.Column("set_aside", sa.Text(), nullable=True))
