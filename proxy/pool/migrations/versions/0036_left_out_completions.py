"""Which completions of a rollout a user's function leaves out of training, while it keeps the others."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("completions_left_out", sa.JSON(), nullable=True))
