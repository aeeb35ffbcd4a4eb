"""Deliveries: what a proxy confirms, what a killed one leaves in doubt, and that one claim wins."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from sqlalchemy import select, update

from proxy.pool.completions.store import CompletionWriter, of_attempt
from proxy.pool.database import Pool, open_pool
from proxy.pool.processes.deliveries import (
    claim,
    confirm,
    mark_delivered,
    mark_undelivered,
    register_proxy,
    release,
    settle_dead_proxies,
    undelivered_of,
)
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_session
from proxy.pool.schema import proxies
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.recording.redelivery.ledger import DeliveryLedger
from tests.pool.make import new_completion

ABANDONED = Untrained(UntrainedReason.ABANDONED)
OTHER = Untrained(UntrainedReason.SAMPLING_PARAMETERS, "temperature")
MARK = b"0123456789abcdef"


def test_a_ledger_knows_what_is_on_its_way() -> None:
    ledger = DeliveryLedger(1)
    assert ledger.state() == (0, [])
    for completion_id in (8, 4, 5):
        ledger.committed(completion_id)
    ledger.settled(5)
    assert ledger.state() == (8, [4, 8])
    ledger.settled(4)
    ledger.settled(8)
    assert ledger.state() == (8, [])


async def add(pool: Pool, ledger: DeliveryLedger, *finish_reasons: str, key: str = "k") -> list[int]:
    attempt, writer = open_session(pool, key), CompletionWriter(pool, ledger.proxy_id, ledger.committed)
    item = replace(new_completion(attempt.id), fingerprint=MARK)
    ids = [await writer.add(replace(item, finish_reason=reason)) for reason in finish_reasons]
    await writer.close()
    return ids


def reasons(pool: Pool, key: str = "k") -> list[Untrained | None]:
    return [item.untrainable for item in of_attempt(pool, open_session(pool, key).id)]


async def test_a_marked_answer_is_claimed_once_and_trained_when_it_arrives(pool: Pool) -> None:
    ledger = DeliveryLedger(register_proxy(pool))
    lost, _ = await add(pool, ledger, "stop", "stop")
    mark_undelivered(pool, lost)
    assert reasons(pool) == [ABANDONED, None]
    with ThreadPoolExecutor(8) as threads:
        claims = list(threads.map(lambda _: claim(pool, lost, ledger.proxy_id), range(8)))
    [won] = [item for item in claims if item is not None]
    assert won.id == lost and undelivered_of(pool, won.attempt_id) == []
    release(pool, lost, ledger.proxy_id)
    assert [item.completion_id for item in undelivered_of(pool, won.attempt_id)] == [lost]
    assert claim(pool, lost, ledger.proxy_id) is not None
    mark_delivered(pool, lost)
    assert reasons(pool) == [None, None] and undelivered_of(pool, won.attempt_id) == []


async def test_a_claim_that_another_proxy_has_by_now_is_not_let_go(pool: Pool) -> None:
    stalled, other = DeliveryLedger(register_proxy(pool)), DeliveryLedger(register_proxy(pool))
    [lost] = await add(pool, stalled, "stop")
    mark_undelivered(pool, lost)
    assert claim(pool, lost, other.proxy_id) is not None  # since the stalled one counted as dead
    release(pool, lost, stalled.proxy_id)
    assert claim(pool, lost, stalled.proxy_id) is None
    release(pool, lost, other.proxy_id)
    assert claim(pool, lost, stalled.proxy_id) is not None


async def test_a_proxy_that_has_recorded_nothing_confirms_what_it_was_registered_with(pool: Pool) -> None:
    """Else whoever settles it would look at all completions, inside of a write transaction."""
    *_, last = await add(pool, DeliveryLedger(register_proxy(pool)), "stop", "stop")
    ledger = DeliveryLedger(register_proxy(pool))
    confirm(pool, ledger.proxy_id, *ledger.state())
    assert confirmed(pool, ledger) == last
    [new] = await add(pool, ledger, "stop")
    confirm(pool, ledger.proxy_id, *ledger.state())
    assert confirmed(pool, ledger) == new > last


def confirmed(pool: Pool, ledger: DeliveryLedger) -> int:
    with pool.read() as connection:
        return connection.execute(select(proxies.c.confirmed).where(proxies.c.id == ledger.proxy_id)).scalar_one()


async def test_a_proxy_that_counted_as_dead_and_works_on_is_kept_account_of(pool: Pool) -> None:
    ledger = DeliveryLedger(register_proxy(pool))
    await add(pool, ledger, "stop")
    count_as_dead(pool, ledger)
    assert reasons(pool) == [ABANDONED]
    confirm(pool, ledger.proxy_id, *ledger.state())
    await add(pool, ledger, "stop")
    count_as_dead(pool, ledger)
    assert reasons(pool) == [ABANDONED, ABANDONED]


def count_as_dead(pool: Pool, ledger: DeliveryLedger) -> None:
    """Settle a proxy that is taken for dead."""
    with pool.write() as connection:
        [owner] = connection.execute(select(proxies.c.owner).where(proxies.c.id == ledger.proxy_id)).scalars()
        this = update(proxies).where(proxies.c.id == ledger.proxy_id)
        connection.execute(this.values(owner=owner | {"started": "0"}))
    settle_dead_proxies(pool)


async def test_a_reason_of_its_own_stays_and_a_part_of_an_answer_is_not_kept(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    item = replace(new_completion(attempt.id), fingerprint=MARK, untrainable=OTHER)
    cold, cut = [await writer.add(replace(item, finish_reason=reason)) for reason in ("stop", "abort")]
    await writer.close()
    for completion_id in (cold, cut):
        mark_undelivered(pool, completion_id)
    assert [missing.completion_id for missing in undelivered_of(pool, attempt.id)] == [cold]
    mark_delivered(pool, cold)
    assert reasons(pool) == [OTHER, OTHER]


async def test_an_attempt_that_has_ended_keeps_its_marks(pool: Pool) -> None:
    ledger = DeliveryLedger(register_proxy(pool))
    lost, arrived = await add(pool, ledger, "stop", "stop")
    mark_undelivered(pool, lost)
    close_attempt(pool, open_session(pool, "k").id, Ending())
    mark_undelivered(pool, arrived)
    mark_delivered(pool, lost)
    assert claim(pool, lost, ledger.proxy_id) is None
    assert reasons(pool) == [ABANDONED, None]


def test_what_a_killed_proxy_did_not_confirm_is_in_doubt(pool: Pool) -> None:
    killed = subprocess.run([sys.executable, __file__, pool.url], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    attempt_id = open_session(pool, "k").id
    assert reasons(pool) == [ABANDONED, None, None, None, None] and undelivered_of(pool, attempt_id) == []
    settle_dead_proxies(pool)
    assert reasons(pool) == [ABANDONED, ABANDONED, None, None, ABANDONED]
    claimed, slow, _, _, last = of_attempt(pool, attempt_id)
    assert [item.completion_id for item in undelivered_of(pool, attempt_id)] == [claimed.id, slow.id, last.id]


async def be_killed(url: str) -> None:
    """A proxy that is killed with five answers: one that it serves again, one that it confirmed, one that was on its
    way, one that another follows, and that other one.
    """
    pool = open_pool(url)
    ledger = DeliveryLedger(register_proxy(pool))
    lost, slow, arrived = await add(pool, ledger, "stop", "stop", "length")
    mark_undelivered(pool, lost)
    assert claim(pool, lost, ledger.proxy_id) is not None
    for completion_id in (lost, arrived):
        ledger.settled(completion_id)
    confirm(pool, ledger.proxy_id, *ledger.state())
    ledger = DeliveryLedger(register_proxy(pool))  # a second proxy in this process, which confirms nothing
    [followed] = await add(pool, ledger, "tool_calls")
    writer = CompletionWriter(pool, ledger.proxy_id, ledger.committed)
    await writer.add(replace(new_completion(open_session(pool, "k").id), fingerprint=MARK, follows=followed))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(be_killed(sys.argv[1]))
