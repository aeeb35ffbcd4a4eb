"""What process rewards need of a rollout."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("behaviour", sa.JSON(), nullable=True))
