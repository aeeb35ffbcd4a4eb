"""What differed in an attempt's environment."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("augmentation", sa.JSON(), nullable=True))
