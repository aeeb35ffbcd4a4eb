"""Which times of an imported call are known. A row needs some, so a document without them leaves the import's there.

The completion's reason (`imported`) says which are missing, and exports leave these out.
"""

import time
from datetime import datetime

from proxy.pool.read.records import CompletionRecord
from proxy.pool.untrained import UntrainedReason

NO_TIME, NO_SECONDS = ", without times", ", without seconds"
"""Behind the detail of `imported`: the document says nothing, or only when the call began."""


def unix_time(text: str | None) -> float | None:
    """Read a timestamp. None where it is missing, names no time zone, or is no time of the past."""
    try:
        read = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    seconds = read.timestamp() if read.tzinfo is not None else 0.0
    return seconds if 0 < seconds <= time.time() else None


def row_times(started_at: float | None, seconds: float | None) -> tuple[float, float, str]:
    """Return unix times for a row, and what its reason says about them."""
    now = time.time()
    if started_at is None:
        return now, now, NO_TIME
    if seconds is None or started_at + seconds > now:
        return started_at, started_at, NO_SECONDS
    return started_at, started_at + seconds, ""


def known_times(item: CompletionRecord) -> tuple[float | None, float | None]:
    """Return when a call began and ended, unix time. None: the row has the time of the import there."""
    imported = item.untrainable is not None and item.untrainable.reason == UntrainedReason.IMPORTED
    detail = item.untrainable.detail if item.untrainable is not None and imported else ""
    if detail.endswith(NO_TIME):
        return None, None
    return item.started_at, None if detail.endswith(NO_SECONDS) else item.finished_at
