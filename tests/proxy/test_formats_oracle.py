"""SGLang's own parsers as the oracle on well-formed turns of every format.

Compared are reasoning, text and calls by meaning. Turns on which SGLang departs from what the models' templates write
are listed in DEPARTURES with the reason, and are held to the calls as they were written.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.sglang import CPU_PATH
from proxy.parsing.turn_parser import Reasoning, Text
from tests.conftest import need
from tests.proxy.test_formats import parse, said, think
from tests.proxy.written import SAMPLES, TOOLS, WRITERS

pytestmark = pytest.mark.long  # tests/proxy/test_formats.py holds the same turns to what was written
ORACLE = Path(__file__).parent / "sglang_parsers.py"
REASONING = {"glm45": "glm45", "glm47": "glm45", "kimi_k2": "kimi_k2", "mistral": "mistral"}
"""SGLang's reasoning parser for a format, where it is not qwen3's or its namesake deepseek-v3."""
OPENED = {"qwen": "qwen3-thinking", "minimax-m2": "minimax", "deepseekv31": "deepseek-r1", "deepseekv32": "deepseek-r1"}
"""The same for formats whose templates open the reasoning in the prompt."""

DEPARTURES: dict[tuple[str, str], str] = {
    ("hermes", "closing tags"): "ends the call inside of a JSON string, which leaves no call",
    ("qwen3_coder", "closing tags"): "ends a value at the first closing tag in it, and drops the rest",
    ("qwen3_coder", "strings that look typed"): "takes null for None where the schema asks for a string",
    ("glm45", "closing tags"): "ends the call inside of a value, and drops the argument",
    ("glm45", "edges"): "unquotes a string that is itself quoted",
    ("glm45", "strings that look typed"): "reads a string as JSON and writes it again: True, None, other white space",
    ("glm47", "closing tags"): "ends the call inside of a value, and drops the argument",
    ("glm47", "edges"): "unquotes a string that is itself quoted",
    ("minimax-m2", "closing tags"): "ends a value at the first closing tag in it, and drops the rest",
    ("minimax-m2", "edges"): "strips line ends that belong to the value (its streaming parser does not)",
    ("minimax-m2", "strings that look typed"): "takes null for None where the schema asks for a string",
    ("deepseekv32", "edges"): "strips white space that belongs to the value",
}
"""(way of writing, sample) -> what SGLang does otherwise."""


@dataclass(frozen=True)
class Turn:
    way: str
    sample: str
    opened: bool
    """Whether the prompt has opened the reasoning."""
    parsers: tuple[str, str]
    text: str


def turns() -> list[Turn]:
    """Every sample in every format: alone, behind thinking and text, behind thinking that the prompt has opened."""
    turns = []
    for way, (form, writer) in WRITERS.items():
        begin, end = think(way)
        before = "" if "no tag" in way else "I look.\n"
        reasoning = REASONING.get(form, "deepseek-v3" if "deepseek" in form else "qwen3")
        for sample, calls in SAMPLES.items():
            written, thought = writer(calls), f"\nhm, {{so}}\n{end}{before}{writer(calls)}"
            turns.append(Turn(way, sample, False, (form, reasoning), written))
            turns.append(Turn(way, sample, False, (form, reasoning), begin + thought))
            if form in OPENED:
                turns.append(Turn(way, sample, True, (form, OPENED[form]), thought))
    return turns


@pytest.fixture(scope="module")
def oracle() -> dict[Turn, Any]:
    need("sglang", find_spec("sglang") is not None)
    asked = [(*turn.parsers, turn.text) for turn in turns()]
    done = subprocess.run(
        [sys.executable, str(ORACLE)],
        input=json.dumps({"tools": TOOLS, "turns": asked}),
        env={**os.environ, "PYTHONPATH": str(CPU_PATH), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(turns(), json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("way", WRITERS)
def test_well_formed_turns_are_read_as_sglang_reads_them(way: str, oracle: dict[Turn, Any]) -> None:
    for turn, (reasoning, content, calls) in oracle.items():
        if turn.way == way and (way, turn.sample) not in DEPARTURES:
            pieces = parse(way, [turn.text], reasoning=turn.opened)
            text = "".join(p.text for p in pieces if isinstance(p, Text))
            thoughts = "".join(p.text for p in pieces if isinstance(p, Reasoning))
            assert [list(call) for call in said(pieces)] == calls, turn
            assert (thoughts.strip(), text.strip()) == (reasoning.strip(), content.strip()), turn


@pytest.mark.parametrize(("way", "sample"), DEPARTURES)
def test_where_sglang_departs_the_calls_are_as_written(way: str, sample: str, oracle: dict[Turn, Any]) -> None:
    for turn, (_, _, calls) in oracle.items():
        if (turn.way, turn.sample) == (way, sample):
            assert said(parse(way, [turn.text], reasoning=turn.opened)) == SAMPLES[sample]
            assert [tuple(call) for call in calls] != SAMPLES[sample], "SGLang agrees by now"
