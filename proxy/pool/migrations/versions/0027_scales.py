"""Running deviations of returns by domain."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("train_steps", sa.Column("scales", sa.JSON(), nullable=True))
