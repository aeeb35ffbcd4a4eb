"""Takes the pictures of docs/dashboard.md from a pool, such as the one of `make demo`.

usage: python -m tests.proxy.dashboard.pictures POOL DIRECTORY [options of `proxy dashboard`]

For replicas on the page of machines, name a proxy that serves the pool with --proxy URL. In the pictures, the pool's
folder has no path of the machine.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from PIL import Image

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from tests.proxy.dashboard.browser import served, wait_for_index, walk
from tests.proxy.dashboard.places import places


@dataclass(frozen=True)
class Picture:
    """A page as it is committed."""

    where: str
    """Its address, with names of `Places` in braces."""
    height: int
    size: str = "desktop"
    dark: bool = False
    clicks: tuple[str, ...] = ()
    """What is clicked, or in the tokens pointed at, before the picture is taken."""

    def lacks(self, found: dict[str, Any]) -> list[str]:
        """Return the names of the places that the pool has not."""
        names = [name for _, name, _, _ in Formatter().parse(self.where) if name]
        return [name for name in names if found[name] is None]


ROLLOUT = "/rollout/{rollout}?call={call}"
PICTURES = {
    "runs": Picture("/", 560),
    "run": Picture("/run/{run}", 1150),
    "over": Picture("/run/{run}?with={over}", 1150),
    "group": Picture("/group/{group}", 760),
    "rollout": Picture(ROLLOUT, 1000),
    "tokens": Picture(
        f"{ROLLOUT}&view=tokens&colour=advantage", 1000, dark=True, clicks=(".tokens [data-at]:last-child",)
    ),
    "events": Picture("/rollout/{eventful}?view=events", 700),
    "log": Picture(f"{ROLLOUT}&view=log", 700),
    "session": Picture("/attempt/{session}", 760),
    "behaviour": Picture("/behaviour/{run}", 1000),
    "search": Picture("/search?run={run}&event=malformed_call", 620),
    "machines": Picture("/machines", 900),
    "phone": Picture(ROLLOUT, 1100, size="phone"),
}
"""By the name of the file, without .png."""


def take(pool: str, directory: Path, *options: str) -> list[str]:
    """Take the pictures that a pool has; return a sentence about each of the others."""
    opened = open_pool(pool, create=False, read_only=True)
    try:
        found = asdict(places(opened))
    finally:
        opened.close()
    directory.mkdir(parents=True, exist_ok=True)
    missing = {name: lacks for name, picture in PICTURES.items() if (lacks := picture.lacks(found))}
    wanted = {
        str(directory / f"{name}.png"): [each.where.format(**found), each.size, each.dark, each.height, each.clicks]
        for name, each in PICTURES.items()
        if name not in missing
    }
    folder = Path(pool).absolute().parent
    renamed = {} if "://" in pool else {str(folder): f"runs/{folder.name}"}
    with served(pool, *options) as address:
        wait_for_index(address)
        walk(address, "pictures", pictures=wanted, renamed=renamed)
    for file in wanted:
        with Image.open(file) as image:
            image.quantize(256).save(file, optimize=True)
    return [f"{name}.png is not taken: the pool has no {lacks[0]!r} (tests/proxy/dashboard/places.py says what it is)"
            for name, lacks in missing.items()]  # fmt: skip


def main() -> int:
    """Take them all; 1 where some are missing."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        missing = take(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
