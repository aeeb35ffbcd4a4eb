"""Measure what keeping the material of events costs the gateway per call: one JSON object as the last line of output.

`python -m benchmarks.events`. The calls are the last ones with a tool call of each recorded session of an agent
(tests/captures/data); its turns are repeated until the conversation has about 1k, 8k or 32k tokens of 4 characters.
What is measured runs once per answer, in a thread, before the row's commit; only the end of an answer waits for it.
Left out: reading events, which no answer waits for.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from proxy.augment.prompt_view import PromptView
from proxy.call import Call, Reply, ToolCall
from proxy.parsing.formats import FORMATS
from proxy.pool.completions.observed import pack
from proxy.recording.observing import observed
from tests.captures.recorded import DIALECTS, Session, full_name, sessions

SIZES = {"1k": 1000, "8k": 8000, "32k": 32_000}
"""Tokens of a conversation."""
CHARACTERS = 4
"""Characters of a token."""
CHINESE = "我先看一下这个文件的内容，然后修改它。" * 50
"""A long reply in a script that no task of the recordings is written in, which is looked up in all results."""
GATEWAY = Path(__file__).parent / "results" / "gateway.json"
"""The last measurement of a call's whole CPU time (benchmarks/gateway.py)."""
ROUNDS = 5
WHOLE = {"1k": "cpu_ms_1k", "32k": "cpu_ms_32k"}
FORM = FORMATS["qwen"]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a second instead of ten; the figures mean little")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.events"}
    figures["command"] += "".join(f" {word}" for word in sys.argv[1:])
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    figures["load_average"] = round(os.getloadavg()[0], 1)
    figures |= measure(5 if arguments.quick else 50)
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode())
    return 0


def measure(times: int) -> dict[str, Any]:
    """Microseconds of CPU per call: the median of the recorded sessions, the most expensive one, their shares."""
    figures: dict[str, Any] = {}
    last = [call for session in sessions() for call in _last_call(session)]
    for name, size in SIZES.items():
        own = [_microseconds(_of_size(call, size), reply, times) for call, reply in last]
        figures[f"us_{name}"], figures[f"most_us_{name}"] = median(own), max(own)
    foreign = [
        _microseconds(_of_size(call, SIZES["32k"]), replace(reply, content=CHINESE), max(1, times // 10))
        for call, reply in last
    ]
    figures["foreign_us_32k"] = median(foreign)
    whole = msgspec.json.decode(GATEWAY.read_bytes())
    for name, key in WHOLE.items():
        figures[f"share_{name}"] = figures[f"us_{name}"] / 1000 / whole[key]
        figures[f"most_share_{name}"] = figures[f"most_us_{name}"] / 1000 / whole[key]
    return figures | {"sessions": len(last)}


def _last_call(session: Session) -> Iterator[tuple[Call, Reply]]:
    """The last call of a session whose request shows results and whose reply calls tools, with that reply."""
    for exchange in reversed(session.exchanges):
        if exchange.reply is None or exchange.kind != "main" or not exchange.reply["calls"]:
            continue
        call = DIALECTS[exchange.api].read(msgspec.json.encode(exchange.body), exchange.path)
        if call.messages[-1]["role"] == "tool":
            calls = tuple(ToolCall(each["id"], full_name(each), each["arguments"]) for each in exchange.reply["calls"])
            yield call, Reply(
                content=exchange.reply["content"], reasoning=exchange.reply["reasoning"], tool_calls=calls,
                finish_reason="tool_calls", stop_sequence=None, prompt_tokens=1, sampled_tokens=1,
                cached_tokens=0,
            )  # fmt: skip
            return


def _of_size(call: Call, tokens: int) -> Call:
    """The call with a conversation of about this size: its first messages are cut, its turns repeated."""
    first = next(place for place, message in enumerate(call.messages) if message["role"] == "assistant")
    room = tokens * CHARACTERS
    head = [
        {**message, "content": (message.get("content") or "")[: room // (2 * first)]}
        for message in call.messages[:first]
    ]
    turns = list(call.messages[first:])
    size = sum(len(message.get("content") or "") for message in turns) or 1
    behind = max(1, (room - sum(len(message["content"]) for message in head)) // size)
    return replace(call, messages=(*head, *turns * behind))


def _microseconds(call: Call, reply: Reply, times: int) -> float:
    """CPU time of one call, the least of some rounds: what is kept is made, and encoded for the pool."""
    _keep(call, reply)
    taken = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        for _ in range(times):
            _keep(call, reply)
        taken.append((time.thread_time_ns() - began) / 1000 / times)
    return min(taken)


def _keep(call: Call, reply: Reply) -> None:
    kept = observed(call, reply, FORM, PromptView(None))
    assert kept is not None
    pack(kept)


if __name__ == "__main__":
    sys.exit(main())
