"""With which tokenizer a proxy reads and writes."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("proxies", sa.Column("tokenizer", sa.Text(), nullable=True))
