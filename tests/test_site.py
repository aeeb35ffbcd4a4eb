"""The site of docs/: it builds without a warning, loads nothing from other hosts, and its reference is the code's."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docs.site import reference
from proxy.config import load_config as load_proxy
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.schema import metadata
from proxy.pool.settings_file import checked
from proxy.pool.training.steps import PHASES
from proxy.pool.untrained import UntrainedReason
from tests.harness.test_tasks import TABLES
from tests.test_pages import block_of
from trainer.config import Config as Training
from trainer.config import load_config as load_trainer
from trainer.report.exporters import FAMILIES, scalars

ROOT = Path(__file__).parent.parent
LOADED = dict.fromkeys(("img", "script", "iframe", "source", "video", "audio", "embed"), "src")
FOREIGN = re.compile(r"(?:https?:)?//")


class Requests(HTMLParser):
    """Collects the addresses that a browser asks for by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in LOADED:
            self.found.append(given.get(LOADED[tag]) or "")
        elif tag == "link" and given.get("rel") not in ("canonical", "index", "search", "next", "prev"):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs.site.build", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return out


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    foreign = {}
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text())
        assert requests.found
        if asked := [address for address in requests.found if FOREIGN.match(address)]:
            foreign[page.name] = asked
    for style in site.rglob("*.css"):
        if asked := re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)", style.read_text()):
            foreign[style.name] = asked
    assert foreign == {}
    assert (site / "searchindex.js").stat().st_size > 50_000


def test_every_page_is_reached_from_the_first(site: Path) -> None:
    links = re.findall(r'class="reference internal" href="([^"#]+)"', (site / "index.html").read_text())
    own = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert own - {f"docs/{Path(link).stem}.md" for link in links} == set()


def test_the_reference_has_what_the_code_has() -> None:
    pages = reference.pages()
    assert all(f"| `{kind}` |" in pages["failures"] for kind in FAILURES)
    assert all(f"| `{reason.value}` |" in pages["failures"] for reason in UntrainedReason)
    for key in ("pool", "max_calls", "extra_args", "max_new_tokens"):
        assert f"| `{key}` |" in pages["proxy"]
    for record in ("verifier.cases", "services", "limits"):
        assert f"## `{record}`\n" in pages["tasks"], record
    for section in ("batch", "credit", "credit.process", "monitor", "optimizer", "push", "report", "sft"):
        assert f"## `[{section}]`" in pages["trainer"], section
    for route in ("POST /v1/messages", "GET /metrics", "GET /api/runs"):
        assert f"`{route}`" in pages["routes"], route
    for table in ("completions", "groups", "fates"):
        assert f"## {table}\n" in pages["tables"]
    for verb in ("proxy pool export", "harness run", "trainer inspect", "sandboxes gc"):
        assert f"### {verb}\n" in pages["commands"]


def test_every_setting_has_a_meaning() -> None:
    for name in ("proxy", "harness", "trainer"):
        rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", reference.pages()[name], re.MULTILINE)
        assert len(rows) > 10
        assert [key for key, meaning in rows if not meaning] == []


def test_the_reference_has_every_field_of_a_task_with_its_meaning() -> None:
    fields, _, types = reference.pages()["tasks"].partition("## Types and limits\n")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", fields, re.MULTILINE)
    records = set(TABLES.values())
    assert sorted(key for key, _ in rows) == sorted(key for record in records for key in record.__struct_fields__)
    assert [key for key, meaning in rows if not meaning] == []
    assert "| `Seconds` | `Annotated[float, msgspec.Meta(gt=0, le=LONGEST_SECONDS)]` |" in types


def test_every_route_and_every_column_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+ /\S+)` \| (?:.* \| )?(.*) \|$", reference.pages()["routes"], re.MULTILINE)
    assert len(rows) > 35 and [route for route, meaning in rows if not meaning] == []
    said = reference.meanings()
    plain = {"id", "created_at"}  # and what refers to another table, which the page names
    columns = [(table.name, column) for table in metadata.sorted_tables for column in table.columns]
    assert {
        f"{table}.{column.name}"
        for table, column in columns
        if (table, column.name) not in said and column.name not in plain and not column.foreign_keys
    } == set()
    assert said.keys() - {(table, column.name) for table, column in columns} == set()
    assert "| `reward` | Float | yes |  | null is missing, never 0 |" in reference.pages()["tables"]


def test_every_query_of_the_grafana_dashboard_names_a_metric_that_exists() -> None:
    exposed = {sample for command in reference.collectors() for sample in samples(command)}
    queries = [target["expr"] for panel in grafana()["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    named = {name for query in queries for name in re.findall(r"\bblackforge_\w+", query)}
    assert named - exposed == set()
    assert {query for query in queries if "blackforge_" not in query} == set()
    named_alone = {name: 1.0 for names in FAMILIES.values() for name in names}
    tags = {tag for tag, _ in scalars(named_alone | {"seconds": dict.fromkeys(PHASES, 1.0)})}
    asked = [found for query in queries for found in re.findall(r'\bmetric(=~?)"([^"]+)"', query)]
    assert {sign for sign, _ in asked} == {"=", "=~"}
    assert [tag for sign, tag in asked if sign == "=" and tag not in tags] == []
    # Prometheus' expressions have to fit a whole value
    assert [tag for sign, tag in asked if sign == "=~" and not any(re.fullmatch(tag, one) for one in tags)] == []


def grafana() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "grafana.json").read_text())


def samples(command: str) -> set[str]:
    """The names of the series of a command's metrics."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        family.name + suffix for family in reference.families(command) for suffix in suffixes.get(family.type, ("",))
    }


def test_the_files_of_the_tutorial_on_models_can_be_read(tmp_path: Path) -> None:
    page = "docs/tutorials/model.md"
    (tmp_path / "serve.toml").write_text(block_of(page, "runs/serve.toml"))
    serving = load_proxy(tmp_path / "serve.toml")
    assert serving.engine.port == 30000 and serving.proxy.sandbox_socket  # without it only processes reach the proxy
    (tmp_path / "train.toml").write_text(block_of(page, "runs/train.toml"))
    training = load_trainer(tmp_path / "train.toml", [])
    assert training.parallel.tensor == 4 and training.pool == serving.pool


def test_the_files_of_the_three_machines_belong_together(tmp_path: Path) -> None:
    for name in ("engine.toml", "serve.toml", "train.toml"):
        (tmp_path / name).write_text(block_of("docs/cluster.md", name))
    engine, serving = load_proxy(tmp_path / "engine.toml"), load_proxy(tmp_path / "serve.toml")
    training = load_trainer(tmp_path / "train.toml", [])
    assert (training.pool, training.push.engines) == (serving.pool, (serving.engine.url,))
    assert engine.engine.model == serving.engine.model == training.model and serving.proxy.sandbox_socket


def training_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each block of a page that is a training file or a part of one: the page, its settings."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.M | re.S):
            settings = tomllib.loads(block)
            if settings.keys() <= set(Training.__struct_fields__):
                yield page.name, settings


def test_what_pages_show_of_training_files_can_be_read() -> None:
    required, shown = dict.fromkeys(("pool", "run", "model", "output"), "x"), list(training_settings())
    for page, settings in shown:
        checked(required | settings, Training, page)
    assert {"credit.md", "drafts.md", "monitor.md", "schedule.md", "weights.md"} <= {page for page, _ in shown}


def test_the_rule_against_edited_tests_can_be_read(tmp_path: Path) -> None:
    rule = re.search(r"```toml\n(\[\[monitor.rule\]\]\n.*?)^```", (ROOT / "docs/tasks.md").read_text(), re.M | re.S)
    assert rule
    (tmp_path / "train.toml").write_text(f'pool = "p"\nrun = "r"\nmodel = "m"\noutput = "o"\n{rule[1]}')
    assert [one.figure for one in load_trainer(tmp_path / "train.toml", []).monitor.rule] == ["events/test_edited"]
