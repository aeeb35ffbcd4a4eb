"""The pictures on the dashboard's page are those that `make pictures` takes."""

import re
from pathlib import Path

import msgspec
import pytest

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.steps import Published
from tests.pool.make import publish_next
from tests.proxy.dashboard.make import metrics, story
from tests.proxy.dashboard.pictures import PICTURES, take
from tests.proxy.dashboard.places import places

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_shows_every_picture_and_no_other_one() -> None:
    named = re.findall(r"\]\(dashboard/([^)]+)\.png\)", (DOCS / "dashboard.md").read_text())
    assert sorted(named) == sorted(PICTURES) == sorted(file.stem for file in (DOCS / "dashboard").iterdir())


def test_a_pool_in_which_nothing_was_trained_has_no_pictures(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    open_run(pool, "collected", "collect", {})
    with pytest.raises(UserError, match="no run of .* has trained a step; make one with: make demo"):
        places(pool)
    pool.close()


@pytest.mark.long
def test_all_pictures_are_taken_of_a_pool_that_has_what_they_show(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    told, other = story(pool), open_run(pool, "another", "train", {})
    for step in (0, 1):
        done = Published(step=step, checkpoint="c", hf_dir="h", metrics=metrics(1) if step else {})
        publish_next(pool, other.id, done)
    (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": told.run}))
    pool.close()
    assert take(str(tmp_path / "pool.db"), tmp_path / "pictures") == []
    for name, picture in PICTURES.items():
        head = (tmp_path / "pictures" / f"{name}.png").read_bytes()[:24]
        width = 390 if picture.size == "phone" else 1280
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (width, picture.height), name
