"""Budgets of attempts and what the proxy saw of them; groups that are lost, replaced or held out."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for column in (
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("purpose", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("replaces", sa.Integer(), nullable=True),
    ):
        op.add_column("groups", column)
    for column in (
        sa.Column("max_turns", sa.Integer(), nullable=True),
        sa.Column("max_tokens", sa.Integer(), nullable=True),
        sa.Column("spent", sa.Text(), nullable=True),
        sa.Column("trouble", sa.Text(), nullable=True),
        sa.Column("trouble_at", sa.Float(), nullable=True),
    ):
        op.add_column("attempts", column)
    for table in ("attempts", "rollouts"):
        op.execute(f"update {table} set failure = 'agent_budget' where failure = 'agent_timeout'")
