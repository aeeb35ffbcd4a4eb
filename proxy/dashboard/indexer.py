"""Builds the search index in a thread of its own while the dashboard is up; one dashboard of a pool at a time does."""

import logging
import os
import sqlite3
import threading
from pathlib import Path

from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.files import InUse, lock_file
from proxy.pool.search.build import Builder
from proxy.pool.search.index import open_writer

log = logging.getLogger(__name__)
PAUSE_SECONDS = 3.0
"""Pause between two looks for what is new, once all is in the index."""
BREATH_SECONDS = 0.01
"""Pause between two pieces, so that pages are served meanwhile."""


class Indexer:
    """The thread that builds an index. `trouble` says why there is none; "": there is, or will be."""

    def __init__(self, pool: Pool, file: Path):
        self._pool = pool
        self.file = file
        self.trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="search-index", daemon=True)

    def start(self) -> None:
        """Begin to build."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the piece at hand."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = lock_file(Path(f"{self.file}.lock"), self.file)
            try:
                self._build()
            finally:
                os.close(lock)
        except InUse:
            log.info("another dashboard of this pool builds the search index")
        except (OSError, sqlite3.Error) as error:
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            way_out = "delete it and start the dashboard again" if damaged else "make its directory writable"
            self.trouble = f"the search index {self.file} cannot be written ({error}); {way_out}"
            log.warning("%s", self.trouble)
        except Exception as error:  # a damaged row, or a bug: the pages go on, and search says why it is not whole
            self.trouble = (
                f"the search index stopped ({type(error).__name__}: {error}); `proxy pool verify` finds damage"
            )
            log.exception("the search index stopped")

    def _build(self) -> None:
        index = open_writer(self.file)
        try:
            builder = Builder(self._pool, index)
            while not self._ended.is_set():
                try:
                    more = builder.step()
                    self.trouble = ""
                except PoolError as error:
                    self.trouble, more = str(error), False
                self._ended.wait(BREATH_SECONDS if more else PAUSE_SECONDS)
        finally:
            index.close()
