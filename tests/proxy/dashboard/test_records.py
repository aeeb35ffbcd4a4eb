"""Ratios and advantages come from the record that the trainer wrote, token by token, and text from its tokenizer."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from proxy.pool.browse.tokens.record import notes, record_of
from proxy.pool.browse.tokens.texts import texts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.schema import policy_versions
from tests.conftest import need
from tests.proxy.dashboard.conftest import Visit
from tests.proxy.dashboard.make import story


def write_record(target: Path, completions: tuple[int, ...], places: list[int], segment: list[int]) -> None:
    """Write a record as the trainer does, with a row before and a row behind the one that is looked for."""
    need("numpy", find_spec("numpy") is not None)
    import numpy as np

    from trainer.data.row import TrainingRow
    from trainer.report.tokens import TokenNotes, write

    rows, values = [], {}
    for ids, at, parts in (((10**6,), [1, 2, 3], [0, 0, 0]), (completions, places, segment), ((10**6 + 1,), [4], [0])):
        length = max(at) + 1
        trained, advantage, own = np.zeros(length, bool), np.zeros(length, np.float32), np.zeros(length, np.int32)
        trained[at], own[at], advantage[at] = True, parts, np.arange(len(at)) / 4 - 0.5
        row = TrainingRow(np.zeros(length), trained, np.zeros(length), advantage, own, completions=ids)
        rows.append(row)
        values[id(row)] = TokenNotes(np.full(len(at), -0.5, np.float32), np.arange(len(at), dtype=np.float32))
    write(target, rows, values)


def test_a_record_is_read_without_numpy_as_the_trainer_reads_it(tmp_path: Path) -> None:
    file = record_of(str(tmp_path / "checkpoints" / "step-000012"), 12)
    assert file == tmp_path / "tokens" / "000012.npz"
    write_record(file, (7, 8), [5, 6, 9, 10], [0, 0, 1, 1])
    from trainer.report.tokens import read

    trained = read(file)[1]
    known = notes(file, [7, 8])
    assert sorted(known) == [(7, 5), (7, 6), (8, 9), (8, 10)]
    for at, key in enumerate(sorted(known)):
        note = known[key]
        assert (note.advantage, note.coefficient) == (trained.advantage[at], trained.coefficient[at])
        assert trained.logp is not None and note.logp == trained.logp[at]
    assert sorted(notes(file, [8])) == [(8, 9), (8, 10)] and notes(file, [99]) == {}


def test_a_damaged_record_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "000001.npz"
    write_record(file, (7,), [5, 6], [0, 0])
    whole = file.read_bytes()
    with pytest.raises(FileNotFoundError):
        notes(tmp_path / "none.npz", [7])
    for damaged in (b"", b"no zip", whole[: len(whole) // 2], whole.replace(b"places.npy", b"pieces.npy")):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            notes(file, [7])


async def test_the_page_of_tokens_has_ratios_advantages_and_texts(
    visit: Visit, database: str, pool: Pool, tmp_path: Path, tiny_model: Path
) -> None:
    told = story(pool, str(tmp_path / "checkpoints"))
    with pool.write() as connection:
        [completion] = connection.exec_driver_sql(
            "select completions.id from completions join attempts on attempts.id = completions.attempt_id join "
            "rollouts on rollouts.attempt_id = attempts.id join groups on groups.id = rollouts.group_id "
            f"where groups.step = 2 and groups.run_id = {told.run_id} order by completions.id limit 1"
        ).scalars()
    write_record(tmp_path / "tokens" / "000002.npz", (completion,), [5, 7, 10], [0, 0, 0])
    visitor = await visit(database, model=tiny_model)
    page = await visitor.ask(f"completions/{completion}/tokens")
    assert page["step"] == 2 and page["notes"] == []
    assert page["advantages"] == [None] * 5 + [-0.5, None, -0.25, None, None, 0.0]
    assert page["coefficients"][5:8] == [0.0, None, 1.0]
    # the trainer's logprob is -0.5; the engine's were -0.25, -0.5, -0.75 ...
    assert page["ratios"][5] == pytest.approx(0.7788, abs=1e-4) and page["ratios"][7] == pytest.approx(1.284, abs=1e-3)
    from tokenizers import Tokenizer

    assert page["texts"] == texts(Tokenizer.from_file(str(tiny_model / "tokenizer.json")), page["ids"])


async def test_a_tokenizer_is_found_where_the_pool_names_exported_weights(
    visit: Visit, database: str, pool: Pool, tiny_model: Path
) -> None:
    told = story(pool)
    with pool.write() as connection:
        connection.execute(policy_versions.update().where(policy_versions.c.step == 3).values(hf_dir=str(tiny_model)))
    visitor = await visit(database)
    page = await visitor.ask(f"completions/{told.calls[0]}/tokens")
    assert not any("tokenizer" in note for note in page["notes"]) and "<" not in page["texts"][1]
    assert any("no step that counts" in note for note in page["notes"])
