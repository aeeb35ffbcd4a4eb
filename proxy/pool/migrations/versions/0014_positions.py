"""Groups that are held out for evaluation take no place in the queue."""

import sqlalchemy as sa
from alembic import op

from proxy.pool.migrations.checks import add_check

revision = "0014"
down_revision = "0013"

NUMBERED = """
update groups set position = numbered.place
from (
    select id, row_number() over (partition by run_id order by queue_index) - 1 as place
    from groups where purpose is null
) as numbered
where numbered.id = groups.id
"""


def upgrade() -> None:
    op.add_column("groups", sa.Column("position", sa.Integer(), nullable=True))
    op.execute(NUMBERED)
    op.create_index(op.f("ix_groups_run_id_position"), "groups", ["run_id", "position"], unique=True)
    add_check("groups", "ck_groups_position", "(position is null) = (purpose is not null)")
