"""What detectors of reward hacking and a judge found of a rollout."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("hacked", sa.Text(), nullable=True))
    op.add_column("rollouts", sa.Column("integrity", sa.JSON(), nullable=True))
