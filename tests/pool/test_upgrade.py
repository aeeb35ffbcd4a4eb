"""A pool that an older blackforge has written is brought up to date with its rows, and works on."""

from sqlalchemy import MetaData, create_engine, insert, select

from proxy.pool.behaviour.read import events
from proxy.pool.completions.store import CompletionWriter, labelled, of_attempt, paths, to_row
from proxy.pool.database import open_pool, upgrade
from proxy.pool.inspect.verify import verify
from proxy.pool.processes.deliveries import claim, mark_undelivered, register_proxy, undelivered_of
from proxy.pool.rollouts.attempts import Ending, close_attempt
from proxy.pool.schema import attempts
from tests.pool.make import new_completion

ENDED = [("agent_budget", "it used up its turns"), ("agent_budget", "it used up its tokens"), ("agent_timeout", "")]
"""Failures that earlier versions stored, with their details."""


async def test_rows_of_before_labels_and_deliveries_stay_as_they_were(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, "0002")
        older = MetaData()
        older.reflect(connection)
        attempt = {"id": 1, "number": 0, "key_hash": "0", "agent": "session", "opened_at": 1.0}
        connection.execute(insert(older.tables["attempts"]).values(attempt))
        for number, (kind, detail) in enumerate(ENDED, 1):
            ended = attempt | {"id": 1 + number, "key_hash": str(number), "failure": kind, "detail": detail}
            connection.execute(insert(older.tables["attempts"]).values(ended))
        row = to_row(new_completion(1))
        known = {name: value for name, value in row.items() if name in older.tables["completions"].c}
        connection.execute(insert(older.tables["completions"]).values(known | {"ordinal": 0}))
    engine.dispose()
    pool = open_pool(database)
    proxy_id = register_proxy(pool)
    [item] = of_attempt(pool, 1)
    assert (item.label, item.shape, item.fingerprint, item.untrainable) == (None, None, b"", None)
    assert item.observed is None and events([item]) == []
    assert paths([item])[item.id].tolist() == [1, 2, 3, 4] and labelled([item]) == [item]
    mark_undelivered(pool, item.id)  # nobody could ask for it again
    assert undelivered_of(pool, 1) == [] and claim(pool, item.id, proxy_id) is None
    writer = CompletionWriter(pool, proxy_id)
    await writer.add(new_completion(1))
    await writer.close()
    close_attempt(pool, 1, Ending())
    with pool.read() as connection:
        kinds = connection.scalars(select(attempts.c.failure).where(attempts.c.id > 1).order_by(attempts.c.id)).all()
    assert kinds == ["agent_turns", "agent_budget", "agent_budget"]
    stored = [(one.label, one.untrainable, one.ordinal) for one in of_attempt(pool, 1)]
    assert stored == [(None, None, 0), (None, None, 1)]
    assert verify(pool).damages == []
    pool.close()
