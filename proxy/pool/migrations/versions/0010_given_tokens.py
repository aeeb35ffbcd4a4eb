"""Which tokens of an answer the proxy wrote itself, to begin a prescribed call."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("completions", sa.Column("given", sa.JSON(none_as_null=True), nullable=True))
