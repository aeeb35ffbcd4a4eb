"""What an attempt's model is shown otherwise than its agent writes it."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("prompt_variation", sa.JSON(), nullable=True))
