"""The databases refuse states, purposes and rewards that do not exist."""

from proxy.pool.migrations.checks import add_check

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    add_check("runs", "ck_runs_purpose", "purpose in ('train', 'eval', 'collect')")
    add_check("groups", "ck_groups_state", "state in ('RUNNING', 'DONE', 'LEASED', 'CONSUMED', 'TOMBSTONE')")
    add_check("groups", "ck_groups_step", "(step is not null) = (state in ('LEASED', 'CONSUMED'))")
    add_check("groups", "ck_groups_purpose", "purpose = 'eval'")
    add_check("rollouts", "ck_rollouts_reward", "reward between -1e308 and 1e308")
