"""Which answers did not arrive, and who knows it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "proxies",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.JSON(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("confirmed", sa.Integer(), nullable=False),
        sa.Column("on_the_way", sa.JSON(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_proxies")),
    )
    op.add_column("completions", sa.Column("proxy_id", sa.Integer(), nullable=True))
    op.add_column("completions", sa.Column("fingerprint", sa.LargeBinary(), nullable=True))
    op.create_table(
        "undelivered",
        sa.Column("completion_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("claimed_by", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_undelivered_attempt_id")),
        sa.ForeignKeyConstraint(["claimed_by"], ["proxies.id"], name=op.f("fk_undelivered_claimed_by")),
        sa.ForeignKeyConstraint(["completion_id"], ["completions.id"], name=op.f("fk_undelivered_completion_id")),
        sa.PrimaryKeyConstraint("completion_id", name=op.f("pk_undelivered")),
    )
    op.create_index(op.f("ix_undelivered_attempt_id"), "undelivered", ["attempt_id"], unique=False)
