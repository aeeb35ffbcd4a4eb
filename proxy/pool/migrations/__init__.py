"""The steps of Alembic that bring an older pool to the newest schema. No queries of the program."""
