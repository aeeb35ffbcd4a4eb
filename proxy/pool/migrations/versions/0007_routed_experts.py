"""The experts that a mixture of experts chose for the tokens of a completion."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("completions", sa.Column("experts", sa.LargeBinary(), nullable=True))
