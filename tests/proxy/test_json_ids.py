"""The JSON lists of prompts hold the right ids, whatever was written before."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pool.completions.common_prefix import BLOCK, common_length
from proxy.prompt.json_ids import KEPT, IdListCache

IDS = st.lists(st.integers(0, 300_000), max_size=6)


@given(st.lists(st.tuples(IDS, IDS, st.booleans()), max_size=2 * KEPT))
def test_a_list_holds_the_ids_of_its_prompt(calls: list[tuple[list[int], list[int], bool]]) -> None:
    lists, path = IdListCache(), array("i")
    for id, (further, sampled, goes_on) in enumerate(calls, start=1):
        prompt = path + array("i", further) if goes_on else array("i", further)
        written = lists.write(prompt, id - 1 or None, common_length(path, prompt, len(path)))
        assert msgspec.json.decode(written) == prompt.tolist()
        path = prompt + array("i", sampled)
        lists.add(id, path, written, len(prompt))


@given(IDS, IDS, IDS, st.integers(0, 9))
def test_what_two_lists_share(begin: list[int], one: list[int], other: list[int], most: int) -> None:
    a, b = array("i", begin + one), array("i", begin + other)
    pairs = enumerate(zip(a[:most], b, strict=False))
    expected = next((i for i, (x, y) in pairs if x != y), min(most, len(a), len(b)))
    assert {common_length(a, b, most, known) for known in (0, expected // 2, expected)} == {expected}


@pytest.mark.parametrize("differs", [0, 1, 77, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK])
def test_what_two_long_lists_share(differs: int) -> None:
    a = array("i", range(2 * BLOCK + 1))
    b = array("i", [-1 if id == differs else id for id in a])
    for most in (0, 1, BLOCK, 2 * BLOCK, 3 * BLOCK):
        expected = min(differs, most, len(a))
        assert {common_length(a, b, most, known) for known in (0, expected // 2, expected)} == {expected}
