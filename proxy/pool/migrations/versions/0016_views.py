"""Views of the tables; they are made after every upgrade (proxy/pool/views.py)."""

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    pass
