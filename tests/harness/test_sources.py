"""Sources of tasks: files, directories, globs and mixes; and the order in which tasks come."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from harness.tasks import load_tasks
from harness.tasks.mix import TaskMix, TaskSource
from harness.tasks.sources import load_sources
from proxy.pool.errors import UserError
from tests.harness.conftest import HELLO, write_tasks
from tests.harness.test_harbor import EXAMPLES, task_directory

ASKED = {"domain": "qa", "instruction": "?", "checker": {"kind": "exact", "answer": "42"}}
CHECKED = {"instruction": "Write", "verifier": {"command": "true"}}


def lines(path: Path, prefix: str, number: int, task: dict[str, Any]) -> Path:
    return write_tasks(path, *({"id": f"{prefix}{index}", **task} for index in range(number)))


def names(mix: TaskMix, seed: int, first: int) -> list[str]:
    return [task.id for task in islice(mix.order(seed), first)]


def test_a_source_is_a_file_a_task_a_directory_of_tasks_or_a_glob(tmp_path: Path) -> None:
    file = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    assert [task.id for task in load_sources([str(file)]).mix.tasks] == ["hello"]
    assert len(load_sources([str(EXAMPLES[0])]).mix.tasks) == 1
    whole = load_sources([str(EXAMPLES[0].parent), str(file)]).mix.tasks
    assert len(whole) == len(EXAMPLES) + 1
    assert load_sources([f"{EXAMPLES[0].parent}/[a-e]*"]).mix.tasks == [
        task for task in whole if task.id.rpartition("/")[2][0] in "abcde"
    ]


def test_a_task_that_is_refused_leaves_the_others(tmp_path: Path) -> None:
    task_directory(tmp_path / "one")
    task_directory(tmp_path / "two", "[environment]\ngpus = 1")
    loaded = load_sources([str(tmp_path)])
    assert [task.id for task in loaded.mix.tasks] == ["one"]
    assert loaded.refused == [f"{tmp_path / 'two'}: environment.gpus is not offered: sandboxes have none"]
    with pytest.raises(UserError, match="the list of tasks is empty; name a JSONL file"):
        load_sources([])
    with pytest.raises(UserError, match="no task can run: all 1 were left out, the first because .*gpus"):
        load_sources([str(tmp_path / "two")])


def test_a_link_to_a_name_that_is_too_long_is_no_task(tmp_path: Path) -> None:
    task_directory(tmp_path / "one")
    (tmp_path / "link").symlink_to("a" * 300)
    for source in (tmp_path, tmp_path / "**/one"):
        assert {task.id for task in load_sources([str(source)]).mix.tasks} == {"one"}


def test_a_mix_file_weights_sources_and_domains(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "a", 3, CHECKED)
    lines(tmp_path / "q.jsonl", "q", 30, ASKED)
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "a.jsonl"\nlimit = 2\nweight = 3\n[[source]]\npath = "q.jsonl"\nweight = 1\n'
    )
    mix = load_sources([str(tmp_path / "mix.toml")]).mix
    assert Counter(name[0] for name in names(mix, 0, 40)) == {"a": 30, "q": 10}
    assert Counter(names(mix, 0, 40))["a0"] == 15 and mix.weights() == {"a.jsonl": 3, "q.jsonl": 1}
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "a.jsonl"\n[[source]]\npath = "q.jsonl"\n[domains]\nagent = 1\nqa = 4\n'
    )
    mix = load_sources([str(tmp_path / "mix.toml")]).mix
    assert Counter(name[0] for name in names(mix, 0, 40)) == {"a": 8, "q": 32}


def test_the_example_of_a_mix() -> None:
    mix = load_sources([str(EXAMPLES[0].parent.parent / "mix.toml")]).mix
    assert Counter(task.domain == "agent" for task in islice(mix.order(0), 30)) == {True: 20, False: 10}


def test_without_weights_every_task_comes_once_an_epoch(tmp_path: Path) -> None:
    tasks = load_tasks(lines(tmp_path / "a.jsonl", "a", 9, CHECKED))
    mix = TaskMix([TaskSource("a", tasks[:4]), TaskSource("b", tasks[4:])])
    order = names(mix, 7, 27)
    assert [sorted(order[at : at + 9]) for at in (0, 9, 18)] == [sorted(task.id for task in tasks)] * 3
    assert order[:9] != order[9:18] and order != names(mix, 8, 27)


def test_the_first_tasks_of_a_mix(tmp_path: Path) -> None:
    tasks = load_tasks(lines(tmp_path / "a.jsonl", "a", 9, CHECKED))
    mix = TaskMix([TaskSource("a", tasks[:4]), TaskSource("b", tasks[4:8]), TaskSource("c", tasks[8:])])
    assert mix.first(6).tasks == tasks[:6] and len(mix.first(6).sources) == 2 and mix.first(None) is mix


def test_at_every_moment_each_source_has_had_its_share(tmp_path: Path) -> None:
    tasks = load_tasks(lines(tmp_path / "a.jsonl", "a", 9, CHECKED))
    sources = [TaskSource("a", tasks[:1], 5.0), TaskSource("b", tasks[1:3], 2.5), TaskSource("c", tasks[3:], 0.5)]
    order = names(TaskMix(sources), 3, 800)
    for done in range(1, len(order) + 1):
        for source in sources:
            had = sum(name in {task.id for task in source.tasks} for name in order[:done])
            assert abs(had - done * source.weight / 8) < 2 if source.weight else False
    assert order == names(TaskMix(sources), 3, 800)


def test_a_weight_of_0_is_refused_and_not_taken_for_1(tmp_path: Path) -> None:
    tasks = load_tasks(lines(tmp_path / "a.jsonl", "a", 2, CHECKED))
    with pytest.raises(UserError, match="the weight of a is 0.0; give it a number above 0"):
        TaskMix([TaskSource("a", tasks[:1], 0.0), TaskSource("b", tasks[1:], 1.0)]).check()


def test_settled_tasks_are_skipped_and_revisited_and_weights_hold(tmp_path: Path) -> None:
    asked = load_tasks(lines(tmp_path / "q.jsonl", "q", 4, ASKED))
    checked = load_tasks(lines(tmp_path / "a.jsonl", "a", 4, CHECKED))
    mix = TaskMix([TaskSource("q", asked, 1), TaskSource("a", checked, 3)], revisit=0.2)
    opened = list(islice(mix.skipping_settled(5, [], lambda task: task.id == "a1"), 400))
    drawn = Counter(task.id for task, _ in opened)
    assert sum(drawn[f"a{n}"] for n in range(4)) == 300 and 15 <= drawn["a1"] <= 35
    assert [place for task, place in opened if task.id[0] == "q"] == list(range(100))
    for done in (1, 57, 200):  # resumed: it goes on behind the places that were reached
        again = mix.skipping_settled(5, [place for _, place in opened[:done]], lambda task: task.id == "a1")
        assert list(islice(again, 50)) == opened[done : done + 50]
    unskipped = islice(mix.skipping_settled(5, [], lambda task: False), 40)
    assert [task.id for task, _ in unskipped] == names(mix, 5, 40)


@pytest.mark.parametrize(
    "mix, sentence",
    [
        ("x", "is not valid TOML"),
        ("source = []", "source = []: expected `array` of length >= 1"),
        ('[[source]]\npath = "a.jsonl"\nweight = -1', "source[0].weight = -1: expected `float` > 0"),
        ('[[source]]\npath = "a.jsonl"\nweight = 0', "source[0].weight = 0: expected `float` > 0"),
        ('[[source]]\npath = "a.jsonl"\n[domains]\nagent = -1', "the weight of agent is -1.0"),
        ('[[source]]\npath = "a.jsonl"\n[domains]\nagent = 0', "the weight of agent is 0.0; give it a number above 0"),
        ('[[source]]\npath = "a.jsonl"\nweigth = 1', "source[0]: unknown key `weigth`"),
        ('[[source]]\npath = "none.jsonl"', "none.jsonl does not exist"),
        ('[[source]]\npath = "none*.jsonl"', "none*.jsonl holds no task"),
        ('[[source]]\npath = "a.jsonl"\n[[source]]\npath = "./a.jsonl"', "id 'a0' is used in a.jsonl and in ./a.jsonl"),
        ('[[source]]\npath = "a.jsonl"\n[domains]\nqa = 1', "the domain 'qa' has a weight and no task"),
        ('[[source]]\npath = "a.jsonl"\n[domains]\ngames = 1', "domains = 'games' is unknown; choose from"),
        (
            '[[source]]\npath = "a.jsonl"\n[[source]]\npath = "q.jsonl"\n[domains]\nqa = 1',
            "the domain 'agent' has tasks and no weight",
        ),
        (
            '[[source]]\npath = "a.jsonl"\nweight = 1\n[[source]]\npath = "q.jsonl"',
            "the source q.jsonl has no weight and others have",
        ),
        ('[[source]]\npath = "mix.toml"', "mixes do not nest"),
        ('revisit = 0\n[[source]]\npath = "a.jsonl"', "revisit = 0: expected `float` >= 0.001"),
    ],
)
def test_a_mix_that_makes_no_sense_is_told_in_one_sentence(tmp_path: Path, mix: str, sentence: str) -> None:
    lines(tmp_path / "a.jsonl", "a", 2, CHECKED)
    lines(tmp_path / "q.jsonl", "q", 2, ASKED)
    (tmp_path / "mix.toml").write_text(mix)
    with pytest.raises(UserError) as raised:
        load_sources([str(tmp_path / "mix.toml")])
    assert sentence in str(raised.value)
