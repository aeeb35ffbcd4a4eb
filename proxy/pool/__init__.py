"""The SQL pool: schema, connection and migrations. Queries live in the rooms below, one per concern."""
