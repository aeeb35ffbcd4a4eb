"""Archives of consumed groups. Indexes by which a database finds what refers to a completion that is deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_archives_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_archives")),
        sa.UniqueConstraint("file", name=op.f("uq_archives_file")),
    )
    op.add_column("groups", sa.Column("archive_id", sa.Integer(), nullable=True))
    op.add_column("groups", sa.Column("dropped_at", sa.Float(), nullable=True))
    op.create_index(op.f("ix_completions_prefix_of"), "completions", ["prefix_of"])
    op.create_index(op.f("ix_completions_follows"), "completions", ["follows"])
    op.create_index(op.f("ix_responses_completion_id"), "responses", ["completion_id"])
