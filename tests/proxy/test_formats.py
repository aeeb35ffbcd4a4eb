"""Every tool-call format: the same pieces for every chunking, and not a character of a turn lost."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.parsing.formats import FORMATS, RecordedSchemas, ToolSchemas, choose
from proxy.parsing.turn_parser import ParsedCall, Piece, Reasoning, Text, TurnParser
from proxy.pool.errors import UserError
from tests.proxy.parsing import pieces_of
from tests.proxy.written import ONE, PARAMETERS, SAMPLES, TOOLS, WRITERS, Calls

EVERY = pytest.mark.parametrize("way", WRITERS)
MARKS = re.compile(
    r"(?:<think>|</think>|\[/?THINK\]|</?minimax:tool_call>|</?｜DSML｜function_calls>|<｜tool▁calls▁(?:begin|end)｜>"
    r"|<\|tool_calls_section_(?:begin|end)\|>|\]|\s)*"
)


def write(way: str, calls: Calls) -> str:
    return WRITERS[way][1](calls)


def parse(way: str, chunks: list[str], tools: ToolSchemas | None = None, reasoning: bool = False) -> list[Piece]:
    """Parse a turn, and join neighbouring pieces of one kind."""
    form = choose(WRITERS[way][0], "[THINK]" if "mistral" in way else "", ())
    parser = TurnParser(form, tools=tools or ToolSchemas(TOOLS), reasoning=reasoning)
    return pieces_of(parser, chunks)


def think(way: str) -> tuple[str, str]:
    return ("[THINK]", "[/THINK]") if "mistral" in way else ("<think>", "</think>")


def said(pieces: list[Piece]) -> Calls:
    return [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, ParsedCall)]


def unaccounted(turn: str, pieces: list[Piece]) -> str:
    """The turn from the first place on that is in no piece and no marker."""
    at = 0
    for piece in pieces:
        source = piece.source if isinstance(piece, ParsedCall) else piece.text
        gap = MARKS.match(turn, at)
        starts = [s for s in range(at, (gap.end() if gap else at) + 1) if turn.startswith(source, s)]
        if not starts:
            return turn[at:]
        at = starts[0] + len(source)
    return MARKS.sub("", turn[at:], count=1)


@EVERY
@pytest.mark.parametrize("sample", SAMPLES)
def test_calls_are_read_as_written_at_every_split(way: str, sample: str) -> None:
    turn = write(way, SAMPLES[sample])
    whole = parse(way, [turn])
    assert said(whole) == SAMPLES[sample]
    assert all(isinstance(piece, ParsedCall) for piece in whole) and parse(way, list(turn)) == whole
    assert all(parse(way, [turn[:cut], turn[cut:]]) == whole for cut in range(len(turn)))


@EVERY
def test_text_and_thinking_stand_beside_calls(way: str) -> None:
    before = "" if "no tag" in way else "I look.\n\n"
    begin, end = think(way)
    turn = f"{begin}\nhm {{\n{end}\n\n{before}{write(way, ONE)}\n\nDone [1]."
    text = [Text(before.strip())] if before else []
    expected = [Reasoning("hm {"), *text, ParsedCall("shell", '{"command": "ls -la"}'), Text("Done [1].")]
    assert all(parse(way, [turn[:cut], turn[cut:]]) == expected for cut in range(len(turn)))


@EVERY
def test_a_turn_cut_by_length_keeps_its_whole_calls_and_the_rest_as_text(way: str) -> None:
    turn = write(way, SAMPLES["two"])
    for length in range(len(turn)):
        pieces = parse(way, list(turn[:length]))
        assert said(pieces) == SAMPLES["two"][: len(said(pieces))] and unaccounted(turn[:length], pieces) == ""
    assert len(said(pieces)) >= 1


@EVERY
def test_a_broken_call_is_text_and_the_next_one_is_found(way: str) -> None:
    marker = FORMATS[WRITERS[way][0]].openers[0]
    turn = f'{marker}{{"name": "shell\n\n{write(way, ONE)}'
    pieces = parse(way, [turn])
    assert unaccounted(turn, pieces) == ""
    if "no tag" not in way:
        assert said(pieces) == ONE and isinstance(pieces[0], Text)
    assert all(parse(way, [turn[:cut], turn[cut:]]) == pieces for cut in range(len(turn)))


@EVERY
@pytest.mark.parametrize("depth", [400, 100_000])
def test_nesting_beyond_all_limits_is_a_call_or_text(way: str, depth: int) -> None:
    turn = write(way, [("edit_file", {"paths": "@"})]).replace('"@"', "@").replace("@", "[" * depth + "]" * depth)
    assert unaccounted(turn, parse(way, [turn])) == ""


@EVERY
def test_text_leaves_up_to_the_opening_marker(way: str) -> None:
    form = FORMATS[WRITERS[way][0]]()
    parser = TurnParser(form, tools=ToolSchemas(TOOLS))
    assert parser.feed("hello wor") == [Text("hello wor")]
    assert parser.feed("ld " + form.openers[0][:-1]) == [Text("ld")]
    assert parser.feed("?") == [Text(f" {form.openers[0][:-1]}?")]


@pytest.mark.parametrize("way", [way for way in WRITERS if FORMATS[WRITERS[way][0]].ends])
def test_a_long_call_leaves_with_its_last_character(way: str) -> None:
    turn = write(way, [("shell", {"command": "x" * 600})])
    parser = TurnParser(FORMATS[WRITERS[way][0]](), tools=ToolSchemas(TOOLS))
    left = [at for at, letter in enumerate(turn) if parser.feed(letter)]
    assert left == [len(turn.removesuffix(section_end(way)).rstrip()) - 1]


def section_end(way: str) -> str:
    return FORMATS[WRITERS[way][0]].section_end if "compact" not in way else ""


@pytest.mark.parametrize("way", ["minimax-m2", "deepseekv3", "deepseekv31", "deepseekv32", "kimi_k2", "mistral"])
def test_a_section_ends_once(way: str) -> None:
    turn = write(way, ONE) + section_end(way)
    assert parse(way, [turn]) == [ParsedCall("shell", '{"command": "ls -la"}'), Text(section_end(way))]


@pytest.mark.parametrize("way", ["qwen3_coder", "glm45", "glm47", "minimax-m2", "deepseekv32"])
def test_a_value_that_does_not_end_takes_no_call_with_it(way: str) -> None:
    broken = re.sub("</parameter>|</arg_value>|</｜DSML｜parameter>", "", write(way, ONE))
    turn = f"{broken}\n{write(way, SAMPLES['two'])}"
    pieces = parse(way, [turn])
    assert said(pieces) == SAMPLES["two"] and unaccounted(turn, pieces) == ""
    assert all(parse(way, [turn[:cut], turn[cut:]]) == pieces for cut in range(len(turn)))


@EVERY
def test_without_tools_all_of_it_is_text(way: str) -> None:
    turn = write(way, ONE)
    parser = TurnParser(FORMATS[WRITERS[way][0]](), tools=None)
    assert "".join(p.text for p in parser.feed(turn) + parser.finish() if isinstance(p, Text)) == turn


@EVERY
def test_a_recorded_answer_explains_its_turn_without_the_schemas(way: str) -> None:
    calls = [*SAMPLES["every type"], ("shell", {"text": "7", "command": "null", "force": False}), *SAMPLES["nested"]]
    turn = write(way, calls)
    pieces = parse(way, [turn])
    reply = [{"function": {"name": p.name, "arguments": p.arguments}} for p in pieces if isinstance(p, ParsedCall)]
    assert said(pieces) == calls and parse(way, [turn], RecordedSchemas(reply)) == pieces


# Text of a value may be anything but what ends a value or a call of a format with bare text.
value_text = st.text(st.sampled_from("ab \n\t{}[]\"'\\<>=|/:,;é你👍`#"), max_size=20).filter(
    lambda t: t == t.strip("\n")
)
values = {
    "string": value_text,
    "integer": st.integers(-(2**70), 2**70),
    "number": st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()),
    "boolean": st.booleans(),
    "object": st.dictionaries(st.text("kö", max_size=2), value_text | st.integers(0, 9) | st.none(), max_size=2),
    "array": st.lists(value_text, max_size=2),
}
one_call = st.tuples(
    st.sampled_from(("shell", "edit_file")),
    st.fixed_dictionaries({}, optional={name: values[schema["type"]] for name, schema in PARAMETERS.items()}),
)


@EVERY
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(one_call, min_size=1, max_size=3), cut=st.integers(1, 40))
def test_any_arguments_survive_any_chunking(way: str, calls: Calls, cut: int) -> None:
    turn = write(way, calls)
    pieces = parse(way, [turn[i : i + cut] for i in range(0, len(turn), cut)])
    assert said(pieces) == calls
    assert unaccounted(turn, pieces) == ""


@EVERY
@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=st.tuples(st.integers(1, 9), st.integers(1, 400)), reasoning=st.booleans())
def test_any_debris_gives_the_same_pieces_and_loses_nothing(way: str, data: Any, cuts: Any, reasoning: bool) -> None:
    turn = "".join(data.draw(st.lists(st.sampled_from(debris(way)), max_size=10)))
    whole = parse(way, [turn], reasoning=reasoning)
    for cut in cuts:
        assert parse(way, [turn[i : i + cut] for i in range(0, len(turn), cut)], reasoning=reasoning) == whole
    assert unaccounted(turn, whole) == ""


def debris(way: str) -> list[str]:
    """Whole calls of a format, pieces of them, and other text."""
    one, two = write(way, ONE), write(way, SAMPLES["two"])
    tags = re.findall(r"<[^<>\n]*>|\[[A-Z_]+\]|[{};\],]", two)
    long = write(way, [("shell", {"command": "x>}" * 200})])
    return [one, two, long, one[: len(one) // 2], one[len(one) // 2 :], *tags, *think(way), "\n", " ", "ab é"]


MARKERS = {
    "<tool_call>\n<function=": "qwen3_coder",
    "<tool_call> <arg_key>": "glm45",
    '<tool_call>\n{"name": ': "qwen",
    "<minimax:tool_call>": "minimax-m2",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>': type + '```json": "deepseekv3",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>": "deepseekv31",
    "<｜DSML｜function_calls>": "deepseekv32",
    "<|tool_calls_section_begin|><|tool_call_begin|>": "kimi_k2",
    "<|python_tag|>": "llama3",
    "[TOOL_CALLS]": "mistral",
    "nothing": "qwen",
}


@pytest.mark.parametrize("template", MARKERS)
def test_the_markers_of_a_template_choose_the_format(template: str) -> None:
    assert type(choose("auto", template, ())) is FORMATS[MARKERS[template]]
    assert type(choose("auto", "no calls here", template.split(" "))) in (FORMATS[MARKERS[template]], FORMATS["qwen"])


def test_the_template_goes_before_the_special_tokens() -> None:
    assert type(choose("auto", "<tool_call>", ("<|python_tag|>",))) is FORMATS["qwen"]
    assert type(choose("auto", "plain", ("<|python_tag|>",))) is FORMATS["llama3"]
    assert choose("mistral", "[THINK]", ()).think == ("[THINK]", "[/THINK]")


def test_an_unknown_format_is_refused_with_the_names() -> None:
    with pytest.raises(UserError, match="'yaml' is unknown; use auto or one of qwen, hermes, qwen3_coder"):
        choose("yaml", "", ())


def test_kimis_ids_are_its_own_unless_they_are_taken() -> None:
    form, calls = FORMATS["kimi_k2"](), [ParsedCall("f", "{}", "functions.f:0"), ParsedCall("f", "{}", "functions.f:0")]
    assert form.ids(calls, ()) == ["functions.f:0", "functions.f:1"]
    assert form.ids(calls, {"functions.f:1"}) == ["functions.f:0", "functions.f:2"]


def test_mistrals_ids_are_nine_letters_and_digits() -> None:
    form = FORMATS["mistral"]()
    (generated, kept) = form.ids([ParsedCall("f", "{}"), ParsedCall("f", "{}", "a1b2c3d4e")], ())
    assert re.fullmatch("[a-z0-9]{9}", generated) and kept == "a1b2c3d4e"
