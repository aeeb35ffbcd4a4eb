"""The pages in a real browser: Debian's chromium, driven by Playwright in an environment of its own.

Not covered: other browsers, and assistive technology beyond what axe-core checks.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from sqlalchemy import update

from proxy.dashboard.access import REFUSED
from proxy.pool.browse.groups import PAGE as GROUPS
from proxy.pool.browse.groups import group_view
from proxy.pool.browse.runs import PAGE
from proxy.pool.browse.sessions import PAGE as SESSIONS
from proxy.pool.browse.sessions import sessions_page
from proxy.pool.database import Pool, insert_row, open_pool
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.processes.owners import owned
from proxy.pool.rollouts.groups import DEFAULTS, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run, open_run
from proxy.pool.schema import attempts, completions, rollouts
from proxy.pool.search.query import HITS
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.steps import Published
from tests.pool.make import publish_next
from tests.proxy.dashboard.browser import EVERY_LOOK, axe, demand_clean, served, wait_for_index, walk, walker
from tests.proxy.dashboard.make import HOSTILE, TASK, Story, Work, hostile_log, metrics, story, tool
from tests.proxy.dashboard.test_plans import filled


def pages_of(told: Story) -> list[str]:
    """Every page, and every view of a rollout."""
    rollout = f"/rollout/{told.rollouts[0]}?call={told.calls[4]}"
    views = [rollout, *(f"{rollout}&view={view}" for view in ("tokens", "events", "log"))]
    groups = [f"/group/{told.group}", f"/group/{told.open_group}", f"/rollout/{told.rollouts[1]}"]
    runs = ["/run/train", "/run/held%20out%2F1", "/run/train?with=held%20out%2F1&metrics=entropy&first=1&last=2"]
    rest = [
        f"/attempt/{told.session}",
        "/behaviour/train",
        "/machines",
        "/search",
        "/search?q=parser",
        "/search?event=retry_loop",
    ]
    return ["/", *runs, *groups, *views, *rest]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Path, Story, Pool]]:
    """A filled pool."""
    pool = open_pool(str(tmp_path / "pool.db"))
    yield tmp_path / "pool.db", story(pool), pool
    pool.close()


def test_a_rollout_of_hostile_texts_is_shown_as_text(home: tuple[Path, Story, Pool]) -> None:
    file, told, _ = home
    with served(file) as address:
        page = f"/rollout/{told.rollouts[0]}?call={told.calls[1]}"
        [seen] = walk(address, "look", pages=[page])
    demand_clean(seen)
    assert HOSTILE[0] in seen["text"] and "<b>the parser</b>" in seen["text"]
    assert "⟨U+202E⟩" in seen["text"] and "\u202e" not in seen["text"]


def test_hostile_results_and_a_hostile_log_are_shown_as_text(home: tuple[Path, Story, Pool]) -> None:
    file, told, _ = home
    size = hostile_log(file, told.attempt)
    with served(file) as address:
        seen = walk(address, "hostile", rollout=f"/rollout/{told.rollouts[0]}?call={told.calls[4]}")
    *_, script, signs = seen["results"]
    escaped = HOSTILE[1].translate({0x1B: "␛", 0x07: "␇", 0x202E: "⟨U+202E⟩", 0x202C: "⟨U+202C⟩"})
    assert script == HOSTILE[0] and signs == escaped and "␛[31mred␛[0m" in escaped
    assert seen["begins"].startswith(f"{HOSTILE[0]}\n{escaped}\nbad \ufffd\ufffd bytes\nxxx")
    assert seen["ends"].endswith("xxx\nthe \ufffd end") and min(seen["sizes"]) > 99_000 and size > 1_000_000
    assert seen["made"] == [0, 0] and "owned" not in seen["title"] and not seen["wide"]
    assert seen["troubles"] == [] and seen["elsewhere"] == [] and "view=events" in seen["url"]


def test_a_browser_without_the_token_gets_one_sentence(home: tuple[Path, Story, Pool]) -> None:
    file, told, _ = home
    paths = ("", "#/run/train", f"#/rollout/{told.rollouts[0]}", "?token=", "?token=x", "index.html", "app.js")
    with served(file) as address:
        seen = walk(address, "stranger", pages=[*paths, "api/runs", f"api/rollouts/{told.rollouts[0]}"])
    for page in seen:
        assert page["status"] == 401 and page["text"].strip() == REFUSED.strip()
        assert page["type"].startswith("text/plain") and page["elements"] == 0 and page["title"] == ""
        assert page["cookies"] == [] and page["asked"] == ["document"]


def test_a_conversation_begins_with_what_is_known_of_its_first_request(home: tuple[Path, Story, Pool]) -> None:
    file, told, _ = home
    pages = [f"/rollout/{told.rollouts[0]}?call={told.calls[at]}" for at in (1, 5, 6)]
    with served(file) as address:
        seen = walk(address, "look", pages=pages, inside=[".turns > .user", ".turns > .begins", ".turns > .begins a"])
    for page, instruction in zip(seen, (1, 0, 0), strict=True):
        demand_clean(page)
        users, begins, links = page["inside"].values()
        assert len(users) == instruction and all(text.startswith("the task's instruction") for text in users)
        assert begins == ["the first request's own messages are not kept; its tokens have them"]
        assert links == ["its tokens"]


def test_what_an_agent_printed_is_called_its_output(home: tuple[Path, Story, Pool]) -> None:
    """The harness keeps it when the agent has ended; until then the page says so."""
    file, told, pool = home
    where = {"pool": pool.url, "name": "train"}
    (file.parent / "whereabouts.json").write_bytes(msgspec.json.encode(where))
    (file.parent / "logs").mkdir()
    (file.parent / "logs" / f"attempt-{told.attempt}.log").write_text("I mend it.\n")
    [running, _] = group_view(pool, told.open_group).members
    pages = [f"/rollout/{told.rollouts[0]}?view=log", f"/rollout/{running.rollout_id}?view=log"]
    with served(file) as address, owned(pool, find_run(pool, "train")):
        seen = walk(address, "look", pages=pages, inside=["[role=tab][aria-selected=true]", ".pane"])
    for page, text in zip(seen, ("I mend it.", "the agent's output comes when the agent has ended"), strict=True):
        demand_clean(page)
        assert page["inside"]["[role=tab][aria-selected=true]"] == ["agent's output"]
        assert text in page["inside"][".pane"][0] and "view=log" in page["url"]


def test_tool_calls_are_folded_and_keys_open_them(home: tuple[Path, Story, Pool]) -> None:
    file, told, pool = home
    long = "\n".join(f"line {number}" for number in range(100))
    calls = [
        tool("bash", {"command": "make test"}),
        tool("write", {"path": "a.py", "text": long}, "c2"),
        tool("<b>bold</b>", {"command": "\n" * 20 + HOSTILE[0]}, "c3"),
    ]
    call = Work(pool, told.session).call({"content": "", "tool_calls": calls}, after=None, ordinal=1)
    with served(file) as address:
        seen = walk(address, "folds", where=f"/attempt/{told.session}?call={call}", axe=axe())
    short, written, hostile = seen["first"]
    assert short[0] and short[1] == "bash 24 characters" and "make test" in short[2]
    assert not written[0] and written[1].startswith("write path: a.py…") and "line 50" not in written[2]
    assert not hostile[0] and hostile[1].startswith(f"<b>bold</b> {HOSTILE[0]}") and seen["scripts"] == 0
    assert [each[0] for each in seen["then"]] == [False, True, True] and "line 99" in seen["then"][1][2]
    assert seen["then"][0][1].startswith("bash make test") and seen["troubles"] == [] and seen["axe"] == []


def test_advice_of_the_monitor_does_not_look_like_an_alarm(home: tuple[Path, Story, Pool]) -> None:
    with served(home[0]) as address:
        runs, run, behaviour = walk(address, "look", pages=["/", "/run/train", "/behaviour/train"])
    for page in (runs, run, behaviour):
        loud = " ".join(page["loud"])
        assert "kl_rollout" in loud and "waiting" not in loud
        demand_clean(page)
    assert "advice: waiting" in runs["text"] and "waiting (advice)" in behaviour["text"]
    assert "advice waiting since step 3, 0.7" in run["text"]
    assert run["text"].index("alarm kl_rollout") < run["text"].index("advice waiting")


def test_a_run_that_nobody_works_at_has_nothing_that_runs(home: tuple[Path, Story, Pool]) -> None:
    file, told, pool = home
    [rollout, _] = group_view(pool, told.open_group).members
    pages = ["/", "/run/train", f"/group/{told.open_group}", f"/rollout/{rollout.rollout_id}"]
    with served(file) as address:
        ended = walk(address, "look", pages=pages)
        with owned(pool, find_run(pool, "train")):
            alive = walk(address, "look", pages=pages)
    for page in ended:
        demand_clean(page)
        assert "cut off" in page["text"] and "at rest" not in page["text"]
    for page in ended[:2]:
        assert "nobody works at it" in page["text"]
    for page in ended[2:]:
        assert "running" not in page["text"].lower()
    for page in alive:
        assert "running" in page["text"].lower() and "cut off" not in page["text"]


def test_calls_are_named_by_their_place_and_addresses_by_their_id(home: tuple[Path, Story, Pool]) -> None:
    file, told, pool = home
    finding = {"detector": "stub", "severity": "weak", "quote": "make", "completion": told.calls[2], "ordinal": 2}
    with pool.write() as connection:
        found = {"integrity": {"findings": [finding | {"severity": "strong"}, finding]}}
        connection.execute(update(rollouts).where(rollouts.c.id == told.rollouts[0]).values(found))
    with served(file) as address:
        seen = walk(address, "names", rollout=f"/rollout/{told.rollouts[0]}?call={told.calls[4]}")
    places = {f"#{id} in the pool": f"call {at}" for at, id in enumerate(told.calls)}
    named = [*seen["findings"], *seen["events"], *seen["turn"]]
    assert len(named) > 6 and all(text.removeprefix("at ") == places[title] for text, title in named)
    assert seen["findings"] == [["at call 2", f"#{told.calls[2]} in the pool"]] * 2
    assert seen["severities"] == [["strong", True], ["weak", False]]
    assert seen["token"] == [["sampled by call 3", f"#{told.calls[3]} in the pool"]]
    assert seen["tree"][1].startswith(f"call 1 (#{told.calls[1]} in the pool); follows call 0; prompt")
    assert re.findall(r"#[0-9]+", seen["text"]) == [f"#{told.attempt}"]  # the attempt's own
    last = next(title for _, title in reversed(seen["events"]))
    assert f"call={last.split()[0].removeprefix('#')}&" in f"{seen['event']}&" and seen["troubles"] == []


def test_the_page_of_tokens_says_where_its_tokenizer_is_from(home: tuple[Path, Story, Pool], tiny_model: Path) -> None:
    file, told, pool = home
    page = f"/rollout/{told.rollouts[0]}?call={told.calls[1]}&view=tokens"
    proxy = register_proxy(pool, fingerprint(tiny_model))
    with pool.write() as connection:
        connection.execute(update(completions).values(proxy_id=proxy))
    with served(file) as address:
        [without] = walk(address, "look", pages=[page])
        shutil.copytree(tiny_model, file.parent / "model")
        [found] = walk(address, "look", pages=[page])
    assert "name the model's directory with --model" in without["text"]
    assert f"by the tokenizer in {file.parent / 'model'}" in found["text"] and "--model" not in found["text"]
    demand_clean(found)


def test_any_metric_is_drawn_by_its_name(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    run = open_run(pool, "one, with a comma", "train", {})
    other = open_run(pool, "two, with a comma", "train", {})
    given = {"tool_failure_rate": {"read, then write": 0.5}, "staleness_groups": {"0": 3, "2": 1}}
    for each in (run, other):
        for step in (0, 1):
            publish_next(pool, each.id, Published(step=step, checkpoint="c", hf_dir="h", metrics=given))
    pool.close()
    field = "[aria-label='add a metric']"
    acts = [
        *(["fill", field, "tool_failure_rate/read, then write"], ["press", field, "Enter"]),
        *(["fill", field, "staleness_groups"], ["press", field, "Enter"]),
        *(["fill", field, "left_out_so_far"], ["press", field, "Enter"]),
        ["reload"],
    ]
    page = "/run/one%2C%20with%20a%20comma?with=two%2C+with+a+comma"
    find = {"legend": ".legend li", "heat": ".charts .heat th", "none": "figure.chart:has(.none) .title"}
    with served(tmp_path / "pool.db") as address:
        *_, before, after = walk(address, "act", page=page, acts=acts, find=find)
    for seen in (before, after):
        assert [each.strip() for each in seen["legend"]] == [
            f"read, then write · {name}, with a comma" for name in ("one", "two")
        ]
        assert seen["heat"] == ["2", "0"] and seen["none"] == ["left_out_so_far"] and seen["troubles"] == []
        assert "no step has a number of this name" in seen["text"]


def test_what_is_not_drawn_is_counted(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    run = open_run(pool, "many", "train", {})
    rules = [f"rule {number:02}" for number in range(43)]
    given = {
        "reward_by_domain": {f"domain {number}": 0.5 for number in range(9)},
        "tool_failure_rate": {f"tool {number:02}": 0.5 for number in range(10)},
        "staleness_tokens": {str(value): 1 for value in range(20)},
        "monitor": dict.fromkeys(rules, 0) | {rules[-1]: 2},
        "monitor_states": {
            name: {"level": "alarm" if name == rules[-1] else "ok", "since": 1, "value": None} for name in rules
        },
    }
    for step in range(100):
        publish_next(pool, run.id, Published(step=step, checkpoint="c", hf_dir="h", metrics=given))
    pool.close()
    find = {"notes": ".note-of", "rows": "#page .heat th", "legend": ".legend li", "says": "#page .heat figcaption"}
    field = "[aria-label='add a metric']"
    acts = [["fill", field, "reward_by_domain/domain 8"], ["press", field, "Enter"], ["go", "/behaviour/many"]]
    with served(tmp_path / "pool.db") as address:
        _, _, curves, behaviour = walk(address, "act", page="/run/many", acts=acts, find=find)
    assert curves["notes"] == ["1 further one is not drawn; any metric by name adds one"]
    assert "domain 8" in [each.strip() for each in curves["legend"]]
    assert curves["rows"] == ["12 and more", *(str(value) for value in range(11, -1, -1))]
    assert "one of 2 drawn steps is shown" in curves["says"][0]
    assert behaviour["notes"] == ["2 further ones are not drawn; the run's page draws any metric by name"]
    assert len(behaviour["rows"]) == 40 and behaviour["rows"][0] == rules[-1]
    assert "3 further rules are not drawn; those that are not ok now come first" in behaviour["text"]


def test_the_chosen_token_and_the_run_of_behaviour_are_in_the_address(home: tuple[Path, Story, Pool]) -> None:
    file, told, _ = home
    tokens = f"/rollout/{told.rollouts[0]}?call={told.calls[1]}&view=tokens"
    third = ".tokens [data-at='3']"
    acts = [
        *(["hover", third], ["click", third], ["reload"], ["press", ".tokens", "ArrowRight"], ["reload"]),
        *(["click", f"[data-call='{told.calls[2]}']"], ["go", "/behaviour"]),
    ]
    find = {"here": ".tokens .here", "tip": ".tip"}
    with served(file) as address:
        first, hovered, clicked, again, moved, last, other, behaviour = walk(
            address, "act", page=tokens, acts=acts, find=find
        )
    start = int(clicked["url"].rpartition("tokens=")[2])
    assert "token=" not in hovered["url"] and f"token={start + 3}&" in clicked["url"] and first["here"] == []
    assert again["url"] == clicked["url"] and again["tip"] == clicked["tip"] and len(again["here"]) == 1
    assert f"token={start + 4}&" in moved["url"] and last["tip"] == moved["tip"] != again["tip"]
    assert "token" not in other["url"].replace("view=tokens", "") and other["here"] == []
    assert behaviour["url"].endswith("#/behaviour/train") and behaviour["troubles"] == []


def test_a_later_page_of_a_list_is_in_the_address(home: tuple[Path, Story, Pool]) -> None:
    file, _, pool = home
    for number in range(PAGE):
        open_run(pool, f"newer {number}", "collect", {})
    run = open_run(pool, "many groups", "train", {})
    for number in range(max(HITS, GROUPS) + 1):
        [member] = open_group(pool, run.id, TASK | {"id": f"task {number}"}, 1)
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=None, reward=0.0))
    lists = {"/": ("older runs", "train"), "/run/many%20groups": ("older groups", "task 0")}
    with pool.write() as connection:
        for number in range(SESSIONS):
            values = {"number": 0, "key_hash": f"newer {number}", "agent": "newer", "opened_at": 1.0}
            insert_row(connection, attempts, values)
    with served(file) as address:
        wait_for_index(address)
        lists["/search?run=many+groups&most_reward=0"] = ("further hits", "task 0,")
        for page, (button, last) in lists.items():
            acts = [["click", f"button:has-text('{button}')"], ["reload"], ["click", "a:text-matches('^all ')"]]
            row = "#page table tbody tr, .hits tbody tr"
            first, more, again, whole = walk(address, "act", page=page, acts=acts, find={"rows": row})
            assert not any(last in text for text in first["rows"]) and "before=" in more["url"]
            assert again["url"] == more["url"] and "the list begins further on" in again["text"]
            assert any(last in text for text in again["rows"]) and len(again["rows"]) < len(more["rows"])
            assert "before=" not in whole["url"] and "further on" not in whole["text"]
            assert len(whole["rows"]) == len(first["rows"]) and whole["troubles"] == []
        acts = [["click", "button:has-text('older sessions')"], ["reload"], ["click", "a:has-text('all sessions')"]]
        rows = {"rows": "[aria-label='sessions'] tbody tr"}
        first, more, again, whole = walk(address, "act", page="/", acts=acts, find=rows)
        assert len(first["rows"]) == SESSIONS and "sessions=" in more["url"] and again["url"] == more["url"]
        assert [len(each["rows"]) for each in (more, again, whole)] == [SESSIONS + 1, 1, SESSIONS], again["rows"]
        assert "the list begins further on" in again["text"] and whole["troubles"] == []


def test_steps_are_chosen_and_values_are_read_by_keyboard(home: tuple[Path, Story, Pool]) -> None:
    plot = "figure.chart:has(.title:text-is('entropy')) .plot"
    first, last = "[aria-label='first step']", "[aria-label='last step']"
    acts = [
        *(["press", plot, "ArrowRight"], ["press", plot, "ArrowRight"], ["press", plot, "End"]),
        *(["press", plot, "ArrowLeft"], ["fill", first, "3"], ["press", first, "Tab"]),
        *(["fill", last, "2"], ["press", last, "Tab"], ["press", "body", "?"]),
    ]
    find = {"spoken": "figure.chart:has(.title:text-is('entropy')) .spoken", "others": ".spoken", "help": "#help"}
    with served(home[0]) as address:
        seen = walk(address, "act", page="/run/train", acts=acts, find=find)
    assert [each["spoken"] for each in seen[1:5]] == [
        ["step 0: entropy –"], ["step 1: entropy 1.5"], ["step 3: entropy 0.5"], ["step 2: entropy 0.75"]
    ]  # fmt: skip
    assert sum(text != "" for text in seen[4]["others"]) == 1
    assert "first=3" in seen[6]["url"] and seen[8]["url"].endswith("first=2&last=3")
    assert "steps 2 to 3 of 0 to 3" in seen[8]["text"] and "in a chart" in seen[9]["help"][0]
    assert seen[9]["troubles"] == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_page_is_clean_in_every_size_and_scheme_and_axe_finds_nothing_serious(
    home: tuple[Path, Story, Pool],
) -> None:
    file, told, _ = home
    with served(file) as address:
        seen = walk(address, "look", 800, pages=pages_of(told), looks=EVERY_LOOK, axe=axe())
    assert len(seen) == 4 * len(pages_of(told))
    for page in seen:
        demand_clean(page)
        assert page["axe"] == [], page


@pytest.mark.long
def test_every_place_is_reached_by_keyboard_alone(home: tuple[Path, Story, Pool]) -> None:
    file, told, pool = home
    looped = rollouts.c.id == told.rollouts[0]
    with pool.write() as connection:
        connection.execute(update(rollouts).where(looped).values(reward=0.0))
    with served(file) as address:
        wait_for_index(address)
        seen = walk(address, "keyboard", run="train", group=told.group, other=told.evaluation)
    assert seen["first"] == "to the content" and "next call" not in seen["help"] and "all runs" in seen["help"]
    assert seen["closed"] and seen["run"].endswith("#/run/train")
    assert f"#/rollout/{told.rollouts[0]}" in seen["rollout"] and "call=" in seen["call"] != seen["rollout"]
    assert "logprob" in seen["token"] and f"#/rollout/{told.rollouts[1]}" in seen["next"]
    assert seen["search"].endswith("#/search?q=parser") and seen["troubles"] == []
    assert seen["question"].endswith("#/search?event=retry_loop&most_reward=0")
    assert f"#/rollout/{told.rollouts[0]}" in seen["looped"] and "call=" in seen["tree"] != seen["call"]
    assert seen["other"].endswith("#/behaviour/held%20out%2F1")
    assert seen["event"].endswith("#/search?run=train&event=retry_loop") and seen["machines"].endswith("#/run/train")


@pytest.mark.long
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_kinds_of_events_and_the_place_in_a_log_are_in_the_address(home: tuple[Path, Story, Pool], size: str) -> None:
    file, told, pool = home
    logs = file.parent / "logs"
    logs.mkdir()
    (logs / f"attempt-{told.attempt}.log").write_text("".join(f"line {number}\n" for number in range(15_000)))
    (file.parent / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
    with served(file) as address:
        rollout = f"/rollout/{told.rollouts[0]}?call={told.calls[0]}"
        seen = walk(address, "places", rollout=rollout, size=size)
    kinds = parse_qs(urlsplit(seen["events"]).fragment.partition("?")[2])["kinds"][0].split(",")
    assert "retry_loop" not in kinds and "tool_failed" in kinds and "tool_called" not in kinds
    assert set(seen["kinds"]) == {kind.replace("_", " ") for kind in kinds}
    assert len(seen["pressed"]) == len(kinds) and seen["troubles"] == []
    place = parse_qs(urlsplit(seen["log"]).fragment.partition("?")[2])["log"][0]
    assert int(place) > 0 and seen["place"] == place and seen["log again"] == seen["log"]


@pytest.mark.long
def test_an_older_run_is_laid_over_another_one_with_its_evaluations(home: tuple[Path, Story, Pool]) -> None:
    file, _, pool = home
    run = open_run(pool, "the older one", "train", {})
    for step in (0, 1):
        done = Published(step=step, checkpoint="c", hf_dir="h", metrics=metrics(1) if step else {})
        evaluation = open_evaluation(pool, run, publish_next(pool, run.id, done), {}, engine="", rollouts=1)
        [member] = open_group(pool, evaluation.run_id, TASK, 1, replace(DEFAULTS, agent="held"))
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=None, reward=step))
    for number in range(PAGE):
        open_run(pool, f"newer {number}", "collect", {})
    with served(file) as address:
        seen = walk(address, "lay", run="train", part="older", name="the older one")
        [matrix] = walk(address, "look", pages=["/run/the%20older%20one"])
    assert "with=the+older+one" in seen["url"] and seen["troubles"] == []
    for title, what in (("reward", ""), ("reward by agent", "held"), ("reward by domain", "agent")):
        label = f"{what} (evaluated, held-out tasks)" if what else "evaluated, held-out tasks"
        assert f"{label} · the older one" in [text.strip() for text in seen["legends"][title]]
    demand_clean(matrix)
    assert "the older one-eval-v" in matrix["text"] and "nothing yet" in matrix["text"]


@pytest.mark.long
def test_a_page_follows_a_pool_that_changes(home: tuple[Path, Story, Pool]) -> None:
    file, told, pool = home
    with served(file) as address:
        walker().begin(address, "live", where="/", text="a run of today")
        assert walker().line(120) == "listening"
        open_group(pool, open_run(pool, "a run of today", "collect", {}).id, {"id": "t"}, 1)
        assert "a run of today" not in walker().seen()["before"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pages_of_a_large_pool_are_clean_in_every_size_and_scheme(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    filled(pool, 100_000)
    (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "long"}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "attempt-50000.log").write_text("a line of the log\n" * 500_000)
    [session] = sessions_page(pool)
    pool.close()
    rollout = "/rollout/50000"
    views = [rollout, *(f"{rollout}?view={view}" for view in ("tokens", "events", "log", "log&log=18000"))]
    searches = ["/search?q=ok", "/search?run=long&least_reward=0.5&agent=a", "/search?event=retry_loop"]
    rest = [f"/attempt/{session.id}", "/machines", "/behaviour/long", *searches]
    pages = ["/", "/run/long", "/group/50000", *views, *rest]
    with served(tmp_path / "pool.db") as address:
        wait_for_index(address, 600)
        seen = walk(address, "look", 1000, pages=pages, looks=EVERY_LOOK, settle=1500)
    assert len(seen) == len(EVERY_LOOK) * len(pages)
    for page in seen:
        # the made pool has no fates, so its account rightly says that rows are missing
        page["alerts"] = [text for text in page["alerts"] if "rows are missing" not in text]
        demand_clean(page)
    texts = {page["page"]: page["text"] for page in seen}
    assert "a line of the log" in texts[f"{rollout}?view=log"] and "calls were read" in texts[f"{rollout}?view=events"]
    assert f"Session {session.id}" in texts[f"/attempt/{session.id}"]
    assert "nothing in the index" not in texts[searches[1]] and "member" in texts[searches[1]]
