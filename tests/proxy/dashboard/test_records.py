"""Ratios and advantages come from the record that the trainer wrote, token by token, and text from its tokenizer."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from proxy.pool.browse.tokens.record import notes, record_of
from proxy.pool.browse.tokens.texts import texts
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.schema import completions, policy_versions
from proxy.pool.tokenizer_fingerprint import fingerprint
from tests.conftest import need
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import Story, plant, story


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


def test_no_link_is_followed_to_a_record_and_no_pipe_waited_for(tmp_path: Path) -> None:
    write_record(tmp_path / "elsewhere.npz", (7,), [5, 6], [0, 0])
    (tmp_path / "link.npz").symlink_to(tmp_path / "elsewhere.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(OSError, match="symbolic link"):
        notes(tmp_path / "link.npz", [7])
    with pytest.raises(UserError, match="is not a regular file"):
        notes(tmp_path / "pipe.npz", [7])


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
    assert page["tokenizer"] == str(tiny_model)


async def test_a_tokenizer_is_found_where_the_pool_names_exported_weights(
    visit: Visit, database: str, pool: Pool, tiny_model: Path
) -> None:
    told = story(pool)
    with pool.write() as connection:
        connection.execute(policy_versions.update().where(policy_versions.c.step == 3).values(hf_dir=str(tiny_model)))
    visitor = await visit(database)
    page = await visitor.ask(f"completions/{told.calls[0]}/tokens")
    assert not any("tokenizer" in note for note in page["notes"]) and "<" not in page["texts"][1]
    assert page["tokenizer"] == str(tiny_model)
    assert any("no step that counts" in note for note in page["notes"])


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model that lies beside the pool `tmp_path`/pool.db."""
    (tmp_path / "model").mkdir()
    shutil.copyfile(tiny_model / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


def recorded(file: Path, ids: str | None) -> tuple[str, Story]:
    """A pool whose calls a proxy with these ids has recorded: its URL, and what it holds."""
    pool = open_pool(str(file))
    told, proxy = story(pool), register_proxy(pool, ids)
    with pool.write() as connection:
        connection.execute(update(completions).values(proxy_id=proxy))
    pool.close()
    return pool.url, told


async def shown(visitor: Visitor, told: Story) -> tuple[str | None, bool]:
    """Where the page of a call's tokens has its texts from, and whether it asks for a model instead."""
    page: dict[str, Any] = await visitor.ask(f"completions/{told.calls[0]}/tokens")
    assert (page["texts"][0] == f"<{page['ids'][0]}>") == (page["tokenizer"] is None)
    return page["tokenizer"], any("--model" in note for note in page["notes"])


async def test_a_model_beside_the_pool_gives_the_texts_if_its_ids_are_those_of_the_proxy(
    visit: Visit, tmp_path: Path, model: Path
) -> None:
    url, told = recorded(tmp_path / "pool.db", fingerprint(model))
    visitor = await visit(url)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert await shown(visitor, told) == (str(model), False)
    for file, ids in (("other.db", "other ids"), ("unknown.db", None)):
        url, told = recorded(tmp_path / file, ids)
        assert await shown(await visit(url), told) == (None, True)


@pytest.mark.parametrize("kind", ["pipe", "link", "endless link", "huge", "linked directory"])
async def test_only_a_regular_tokenizer_of_bounded_size_is_read_unless_a_person_names_it(
    visit: Visit, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("proxy.pool.browse.tokens.texts.LARGEST", 1_000_000)
    url, told = recorded(tmp_path / "pool.db", fingerprint(model))
    visitor = await visit(url)
    assert await shown(visitor, told) == (str(model), False)
    if kind == "linked directory":
        (tmp_path / "away").mkdir()
        model.symlink_to(model.rename(tmp_path / "away" / "model"))
    else:
        plant(model / "tokenizer.json", kind)
    assert await shown(visitor, told) == (None, True)
    if kind == "link":
        page = await visitor.ask(f"completions/{told.calls[0]}/tokens")
        assert any(note.endswith(f"--model {model}") for note in page["notes"])
        assert await shown(await visit(url, model=model), told) == (str(model), False)


@pytest.mark.parametrize("kind", ["pipe", "link", "endless link", "huge"])
async def test_the_model_of_the_runs_own_proxy_gives_the_texts(
    visit: Visit, tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    url, told = recorded(tmp_path / "pool.db", fingerprint(tiny_model))
    visitor, run = await visit(url), tmp_path / "a run"
    run.mkdir()
    (run / "proxy.toml").write_text(f'pool = "x"\n\n[engine]\nmodel = "{tiny_model}"\n')
    assert await shown(visitor, told) == (None, True)  # nothing says that it is a directory of this run
    (run / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": url, "name": "train"}))
    assert await shown(visitor, told) == (str(tiny_model), False)
    plant(run / "proxy.toml", kind)
    assert await shown(visitor, told) == (None, True)
    (run / "proxy.toml").unlink()
    for content in ("engine = 1", "[engine]\nmodel = 1", '[engine]\nmodel = "\\u0000"', "no TOML"):
        (run / "proxy.toml").write_text(content)
        assert await shown(visitor, told) == (None, True)
