"""A kind of its own for agents that used up their turns."""

from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    for table in ("attempts", "rollouts"):
        op.execute(
            f"update {table} set failure = 'agent_turns' "
            "where failure = 'agent_budget' and detail = 'it used up its turns'"
        )
