"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _add_runs()
    _add_groups()
    _add_rollouts()
    _add_completions()


def _add_runs() -> None:
    """Runs, with what happened in them and the versions that were trained."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("queue_limit", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("hf_dir", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("pushed_at", sa.Float(), nullable=True),
        sa.Column("retired_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policy_versions_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_versions")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_policy_versions_run_id_step"), "policy_versions", ["run_id", "step"], unique=False)


def _add_groups() -> None:
    """Tasks, the groups in which they are rolled out, and the steps that took them."""
    op.create_table(
        "tasks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_tasks_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_tasks_run_id_name")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("queue_index", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.Integer(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_groups_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("run_id", "queue_index", name=op.f("uq_groups_run_id_queue_index")),
    )
    op.create_index(op.f("ix_groups_run_id_state"), "groups", ["run_id", "state"], unique=False)
    op.create_table(
        "train_steps",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["version_id"], ["policy_versions.id"], name=op.f("fk_train_steps_version_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_train_steps")),
        sa.UniqueConstraint("version_id", name=op.f("uq_train_steps_version_id")),
    )


def _add_rollouts() -> None:
    """Rollouts and their attempts."""
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("group_id", sa.Integer(), nullable=False),
        sa.Column("member", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("reward_parts", sa.JSON(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_rollouts_group_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("group_id", "member", name=op.f("uq_rollouts_group_id_member")),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("rollout_id", sa.Integer(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("timings", sa.JSON(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_attempts_rollout_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_attempts_key_hash")),
    )
    op.create_index(op.f("ix_attempts_rollout_id"), "attempts", ["rollout_id"], unique=False)
    op.create_index(op.f("ix_attempts_run_id"), "attempts", ["run_id"], unique=False)


def _add_completions() -> None:
    """Completions, the nodes of an attempt's prefix trees."""
    op.create_table(
        "completions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("prefix_of", sa.Integer(), nullable=True),
        sa.Column("prefix_length", sa.Integer(), nullable=False),
        sa.Column("follows", sa.Integer(), nullable=True),
        sa.Column("prompt_tail", sa.LargeBinary(), nullable=False),
        sa.Column("sampled", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("untrainable", sa.Text(), nullable=True),
        sa.Column("reply", sa.JSON(), nullable=False),
        sa.Column("path_crc", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_completions_attempt_id")),
        sa.ForeignKeyConstraint(["follows"], ["completions.id"], name=op.f("fk_completions_follows")),
        sa.ForeignKeyConstraint(["prefix_of"], ["completions.id"], name=op.f("fk_completions_prefix_of")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_completions")),
        sa.UniqueConstraint("attempt_id", "ordinal", name=op.f("uq_completions_attempt_id_ordinal")),
    )
