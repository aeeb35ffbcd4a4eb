"""The account: what steps did with each completion, and how many tokens each attempt that has ended has sampled."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "fates",
        sa.Column("completion_id", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("trained", sa.Integer(), nullable=False),
        sa.Column("left_out", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["completion_id"], ["completions.id"], name=op.f("fk_fates_completion_id")),
        sa.ForeignKeyConstraint(["version_id"], ["policy_versions.id"], name=op.f("fk_fates_version_id")),
        sa.PrimaryKeyConstraint("completion_id", name=op.f("pk_fates")),
    )
    op.add_column("train_steps", sa.Column("fates", sa.JSON(), nullable=True))
    op.add_column("attempts", sa.Column("sampled_tokens", sa.Integer(), nullable=True))
    tokens = (
        "case when completions.given is null then length(completions.sampled) else length(completions.logprobs) end"
    )
    counted = f"select coalesce(sum({tokens} / 4), 0) from completions where completions.attempt_id = attempts.id"
    op.execute(f"update attempts set sampled_tokens = ({counted}) where closed_at is not null")
