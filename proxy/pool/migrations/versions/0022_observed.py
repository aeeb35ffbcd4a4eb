"""What a completion's request showed of its agent's surroundings."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("completions", sa.Column("observed", sa.LargeBinary(), nullable=True))
