"""The tree that the calls of one attempt share: several threads read and extend it at once, and it exists once."""

import sys
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from threading import Event

import pytest

from proxy.call import Call
from proxy.pool.completions.records import RequestShape
from proxy.prompt.continuation.request_shape import RequestShapes
from proxy.prompt.json_ids import IdListCache
from proxy.prompt.splice import Prompt, PromptBuilder
from proxy.prompt.template import ChatTemplate
from tests.pool.make import new_completion
from tests.proxy.conftest import user

SAID = {"role": "assistant", "content": "ok"}


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def while_adding(add: Callable[[int], object], ask: Callable[[], object], rounds: int) -> None:
    """Ask often while another thread adds; an error of either is raised."""
    over = Event()

    def adding() -> None:
        for id in count(1):
            add(id)
            if over.is_set() or id >= 20_000:
                return

    with ThreadPoolExecutor(1) as thread:
        adder = thread.submit(adding)
        try:
            for _ in range(rounds):
                ask()
        finally:
            over.set()
        adder.result()


def test_texts_are_looked_up_while_others_are_recorded(template: ChatTemplate) -> None:
    prompts, item = PromptBuilder(template), new_completion(1)
    asked = Call(model="", prompt="a text that is longer than those that are recorded")

    def add(id: int) -> None:
        prompt = Prompt(array("i", [1, 2]), f"text {id}", None, None, 0, written=b"[1,2]", plain=True)
        prompts.add(id, item, array("i", [1, 2, 3, 4]), prompt)

    for id in range(3000):
        add(20_000 + id)
    while_adding(add, lambda: prompts.build(asked, True), rounds=100)


def test_shapes_are_made_while_equal_replies_are_recorded() -> None:
    shapes, item = RequestShapes(), new_completion(1)
    shaped = type(item)(**{**vars(item), "shape": RequestShape()})
    call = Call(model="", messages=(user("x"), SAID, user("y")))
    while_adding(lambda id: shapes.add(id, shaped), lambda: shapes.of(call, None), rounds=300)


def test_lists_are_added_by_several_threads() -> None:
    lists, path = IdListCache(), array("i", [1, 2])
    numbers = count()

    def add(*_: int) -> None:
        lists.add(next(numbers), path, b"[1]", 1)

    while_adding(add, add, rounds=20_000)


def test_a_conversation_is_held_once_and_not_once_per_turn(template: ChatTemplate) -> None:
    prompts, path, paths = PromptBuilder(template), array("i"), dict[int, "array[int]"]()
    for id in range(1, 51):
        item = replace(new_completion(1), prefix_of=id - 1 or None, prefix_length=len(path))
        path = paths[id] = path + item.prompt_tail + item.sampled
        prompts.add(id, item, path)
    branch = replace(new_completion(1, [9], [8]), prefix_of=30, prefix_length=len(paths[30]))
    paths[51] = paths[30] + branch.prompt_tail + branch.sampled
    prompts.add(51, branch, paths[51])
    assert prompts.tree.token_count == len(paths[50]) + len(paths[51])
    assert {id: prompts.tree.path(id) for id in paths} == paths
