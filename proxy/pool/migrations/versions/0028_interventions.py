"""What the monitor did: pauses, rollbacks, dropped tasks; and the rollouts that it masks."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("left_out", sa.Text(), nullable=True))
    op.create_table(
        "interventions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=True),
        sa.Column("task_id", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_interventions_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_interventions_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_interventions")),
    )
    op.create_index(op.f("ix_interventions_run_id_action"), "interventions", ["run_id", "action"])
    op.create_index(op.f("ix_interventions_task_id"), "interventions", ["task_id"])
