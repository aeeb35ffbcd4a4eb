"""Adds CHECK constraints to tables that hold rows."""

from alembic import op
from sqlalchemy import text

from proxy.pool.errors import UserError


def add_check(table: str, name: str, condition: str) -> None:
    """Demand this condition of every row of a table. UserError when a row does not meet it."""
    connection = op.get_bind()
    wrong = connection.execute(text(f"select count(*) from {table} where not ({condition})")).scalar_one()
    if wrong:
        raise UserError(
            f"{wrong} rows of the pool's table {table} do not meet the condition {condition}, so that it cannot be "
            "brought up to date; correct them, or go back to a copy of the pool"
        )
    if connection.dialect.name != "sqlite":
        op.create_check_constraint(name, table, condition)
        return
    # SQLite cannot add a constraint. As https://sqlite.org/lang_altertable.html (section 7) says for changes that do
    # not affect stored rows, the text of the table's definition is edited, which copies no row.
    version = connection.exec_driver_sql("pragma schema_version").scalar_one()
    connection.exec_driver_sql("pragma writable_schema = on")
    connection.execute(
        text(
            "update sqlite_master set sql = rtrim(substr(sql, 1, length(rtrim(sql)) - 1)) || :check || ')' "
            "where type = 'table' and name = :name"
        ),
        {"check": f", \n\tCONSTRAINT {name} CHECK ({condition})\n", "name": table},
    )
    connection.exec_driver_sql(f"pragma schema_version = {version + 1}")
    connection.exec_driver_sql("pragma writable_schema = off")
