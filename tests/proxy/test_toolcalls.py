"""The incremental parser: the same pieces for every chunking, and nothing of a turn lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.parsing.formats import FORMATS, ToolSchemas
from proxy.parsing.turn_parser import ParsedCall, Piece, Reasoning, Text, TurnParser
from tests.proxy.parsing import pieces_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", " ", "ab", "<", "</", "<tool_", "é"]


def parse(chunks: list[str], *, tools: bool = True, reasoning: bool = False) -> list[Piece]:
    """Parse a turn, and join neighbouring pieces of one kind."""
    parser = TurnParser(FORMATS["qwen"](), tools=ToolSchemas() if tools else None, reasoning=reasoning)
    return pieces_of(parser, chunks)


@pytest.mark.parametrize(
    ("turn", "pieces"),
    [
        ("hello", [Text("hello")]),
        (f"look\n{CALL}", [Text("look"), ParsedCall("f", '{"a": 1}')]),
        (f"{CALL}\n{CALL}", [ParsedCall("f", '{"a": 1}')] * 2),
        (f"<think>\nhm\n</think>\n\nyes {CALL}", [Reasoning("hm"), Text("yes"), ParsedCall("f", '{"a": 1}')]),
        ("<think>\nno end", [Reasoning("no end")]),
        ("a <think> b", [Text("a <think> b")]),
        ("1 < 2 <tool", [Text("1 < 2 <tool")]),
        ("<tool_call>\n{broken}\n</tool_call> x", [Text("<tool_call>\n{broken}\n</tool_call> x")]),
        ('<tool_call>{"name": "f"}</tool_call>', [Text('<tool_call>{"name": "f"}</tool_call>')]),
        ('<tool_call>{"name": "f", "arguments": {}}', [Text('<tool_call>{"name": "f", "arguments": {}}')]),
        ("ends with space \n", [Text("ends with space \n")]),
    ],
)
def test_every_chunking_gives_these_pieces(turn: str, pieces: list[Piece]) -> None:
    assert parse([turn]) == pieces
    assert parse(list(turn)) == pieces
    assert all(parse([turn[:cut], turn[cut:]]) == pieces for cut in range(len(turn)))


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), cut=st.integers(1, 9), reasoning=st.booleans())
def test_random_turns_do_not_depend_on_the_chunking(parts: list[str], cut: int, reasoning: bool) -> None:
    turn = "".join(parts)
    chunks = [turn[i : i + cut] for i in range(0, len(turn), cut)]
    assert parse(chunks, reasoning=reasoning) == parse([turn], reasoning=reasoning)


@given(parts=st.lists(st.sampled_from(PARTS[2:]), max_size=12))
def test_without_tools_and_reasoning_all_of_it_is_text(parts: list[str]) -> None:
    turn = "ab" + "".join(parts)
    assert parse(list(turn), tools=False) == [Text(turn)]


def test_text_leaves_before_the_turn_ends() -> None:
    parser = TurnParser(FORMATS["qwen"](), tools=ToolSchemas())
    assert parser.feed("hello wor") == [Text("hello wor")]
    assert parser.feed("ld <tool") == [Text("ld")]


def test_an_opened_reasoning_goes_on_from_the_prompt() -> None:
    assert parse(["hm\n</think>\n\nyes"], reasoning=True) == [Reasoning("hm"), Text("yes")]
