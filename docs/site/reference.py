"""The pages of the reference, made from the code, so that they say what it does.

Settings and tasks come from the classes that read the files and the texts under their fields, commands from their
parsers, routes from the applications, tables from the schema.
"""

import argparse
import ast
import inspect
import io
import os
import re
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.registry import Collector

import harness.cli
import proxy.commands.main
import sandboxes.base
import sandboxes.cli
import trainer.commands.main
from harness.monitor.rule_metrics import RuleMetrics
from harness.settings import Settings
from harness.tasks import schema as task_schema
from harness.tasks import verdict_options
from harness.tasks.schema import Task
from proxy.config import ProxyConfig
from proxy.dashboard.app import Dashboard
from proxy.http.admission import AdmissionGate, Capacity
from proxy.http.limits import LIMITS
from proxy.http.metrics import ProxyMetrics
from proxy.pool import schema
from proxy.pool.database import open_pool
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.schema import metadata
from proxy.pool.terminal.command_line import verbs
from proxy.pool.untrained import UntrainedReason
from proxy.server import Gateway
from sandboxes.metrics import SandboxMetrics
from trainer.config import Config
from trainer.report.prometheus import StepMetrics

COLUMNS = "100"
PARSERS = {
    "proxy": proxy.commands.main.parser,
    "harness": harness.cli.parser,
    "trainer": trainer.commands.main.parser,
    "sandboxes": sandboxes.cli.parser,
}
Rows = Iterable[tuple[str, ...]]


def pages() -> dict[str, str]:
    """Return every page of the reference as Markdown, by name."""
    return {
        "proxy": _settings_page("Settings of the proxy and the engine", "`proxy serve FILE`", ProxyConfig),
        "harness": _settings_page("Settings of a run", "`harness run FILE.toml`, and as flags", Settings),
        "trainer": _settings_page("Settings of the trainer", "`trainer launch FILE`", Config),
        "tasks": _tasks_page(),
        "commands": _commands_page(),
        "routes": _routes_page(),
        "metrics": _metrics_page(),
        "failures": _failures_page(),
        "tables": _tables_page(),
    }


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", *parts)) + "\n"


def _table(head: tuple[str, ...], rows: Rows) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in row) + " |" for row in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# settings


def _settings_page(title: str, where: str, root: type[msgspec.Struct]) -> str:
    parts = [f"Read by {where}. Generated from `{root.__module__}`."]
    for name, section in _sections("", root):
        heading = f"## `[{name}]`" if name else "## The top of the file"
        parts += [heading, _prose(section), _settings_table(section)]
    return _page(title, *parts)


def _settings_table(section: type[msgspec.Struct]) -> str:
    rows = [(f"`{key}`", f"`{kind}`", default, text) for key, kind, default, text in _fields(section)]
    return _table(("key", "type", "default", "meaning"), rows)


def _tasks_page() -> str:
    """The fields of a task, each record once, under the shortest name that a task has for it."""
    names: dict[type[msgspec.Struct], str] = {}
    for name, record in sorted(_sections("", Task), key=lambda one: one[0].count(".")):
        names.setdefault(record, name)
    parts = [
        f"A line of a task file, and the records in it. Generated from `{Task.__module__}`. [Tasks](../tasks.md) "
        "explains them, with examples, and says how Harbor's directories become the same record."
    ]
    for record, name in names.items():
        parts += [f"## `{name}`" if name else "## A task", _prose(record), _settings_table(record)]
    named = dict(_names(task_schema, verdict_options, sandboxes.base))
    used = [name for name in named if re.search(rf"\b{name}\b", "\n".join((*parts, *named.values())))]
    rows = [(f"`{name}`", f"`{named[name]}`") for name in used]
    return _page("Fields of a task", *parts, "## Types and limits", _table(("name", "is"), rows))


def _names(*modules: ModuleType) -> Iterator[tuple[str, str]]:
    """The names that modules give to types and numbers, with what they stand for."""
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Constant):
                yield ast.unparse(node.targets[0]), ast.unparse(node.value)


def _prose(section: type) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def _sections(name: str, struct: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The structs of a settings file with the names of their sections, each once, in the order of the file."""
    yield name, struct
    for key, hint in get_type_hints(struct).items():
        for inner in _structs(hint):
            yield from _sections(f"{name}.{key}" if name else key, inner)


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    elif get_origin(hint) in (Union, UnionType, tuple, list, dict, Mapping, Annotated) or get_args(hint):
        for inner in get_args(hint):
            yield from _structs(inner)


def _fields(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and text of each field, as the source has them. Fields that hold a section are left out."""
    hints = get_type_hints(struct)
    (tree,) = ast.parse(dedent(inspect.getsource(struct))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        if not text and any(True for _ in _structs(hints[node.target.id])):
            continue
        default = "required" if node.value is None else f"`{ast.unparse(node.value)}`"
        yield node.target.id, ast.unparse(node.annotation), default, str(text)


# commands


def _commands_page() -> str:
    parts = [
        "What `--help` prints, of every verb. `COMMAND --print-completion bash` prints a script that completes words "
        "in a shell, `COMMAND --version` the version."
    ]
    for name, parser in PARSERS.items():
        parts.append(f"## {name}")
        for words, verb in verbs(parser(), name):
            parts += [f"### {words}", f"```text\n{_help(verb)}```"]
    return _page("Commands", *parts)


def _help(parser: argparse.ArgumentParser) -> str:
    """The help in lines of COLUMNS, without the places of this machine."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        return parser.format_help().replace(str(Path.home()), "~").replace(sys.prefix, ".venv")
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


# routes


def _routes_page() -> str:
    gateway = object.__new__(Gateway)  # a real one would want a model, which routes do not depend on
    vars(gateway)["_limits"] = LIMITS
    open_to = {(method, path) for method, path, _ in _routes(gateway.sandbox_app())} | {("GET", "/health")}
    rows = [
        (f"`{method} {path}`", "any key" if (method, path) in open_to else "the admin key", text)
        for method, path, text in _routes(gateway.app())
    ]
    with tempfile.TemporaryDirectory() as directory:
        pool = open_pool(f"{directory}/pool.db")
        shown = [row for row in _routes(Dashboard(pool).app()) if row[1].startswith("/api/")]
        pool.close()
    return _page(
        "HTTP routes",
        "## The proxy",
        "Model routes answer under any prefix in place of `/v1`: `/v1beta` is Gemini's, `/r/KEY/v1` is for tools that "
        "cannot set a key. Where the proxy listens beyond loopback, keys are issued ones "
        "([architecture](../architecture.md)).",
        _table(("route", "needs", "what it does"), rows),
        "## The dashboard",
        "They only read, and need the token of the dashboard's address ([dashboard](../dashboard.md)).",
        _table(("route", "what it does"), ((f"`{method} {path}`", text) for method, path, text in shown)),
    )


def _routes(app: web.Application) -> list[tuple[str, str, str]]:
    """Method, path and the first sentence about the handler, of each route but HEAD."""
    found = []
    for route in app.router.routes():
        resource = route.resource
        if route.method == "HEAD" or resource is None:
            continue
        path = resource.canonical.replace("/{prefix}", "/v1/")
        text = (inspect.getdoc(route.handler) or "").partition("\n")[0]
        found.append((route.method, path, text))
    return found


# metrics


def collectors() -> dict[str, list[Collector]]:
    """What is behind /metrics, by command, without values."""
    gate = AdmissionGate(Capacity(total=1, per_run=1, per_attempt=1))
    return {
        "proxy": [ProxyMetrics(gate, lambda: 0, Counter())],
        "harness": [SandboxMetrics().registry, RuleMetrics()],
        "trainer": [StepMetrics("train")],
    }


def families(command: str) -> list[Metric]:
    """The metrics of a command."""
    return [family for collector in collectors()[command] for family in collector.collect()]


def _metrics_page() -> str:
    parts = [
        "In Prometheus' text format. [Watch a run with Prometheus](../metrics.md) says where each is served. The "
        "metrics of a training step are in [training](../training.md#metrics)."
    ]
    for command in collectors():
        rows = [(f"`{family.name}`", family.type, family.documentation) for family in families(command)]
        parts += [f"## {command}", _table(("metric", "type", "meaning"), rows)]
    return _page("Metrics", *parts)


# failures and reasons


def _failures_page() -> str:
    failures = [(f"`{failure.kind}`", failure.treatment, failure.text) for failure in FAILURES.values()]
    reasons = [(f"`{reason.value}`", reason.meaning) for reason in UntrainedReason]
    return _page(
        "Failures and reasons",
        "## Failures of rollouts",
        "`retry`: run again, masked when its attempts are used up. `mask`: no reward, which is not 0, and left out of "
        "its group. `filter`: the whole group is dropped and opened again. `policy`: the verifier's verdict counts. "
        "`fatal`: the run ends.",
        _table(("failure", "treatment", "what happened"), failures),
        "## Why a token is not trained",
        _table(("reason", "meaning"), reasons),
    )


# tables


def _tables_page() -> str:
    parts = [
        "The tables of a pool, of `proxy/pool/schema.py`. Times are unix seconds, token arrays little-endian int32, "
        "logprobs float32. Read them with [the views or from Python](../pool.md)."
    ]
    said = meanings()
    for table in metadata.sorted_tables:
        rows = []
        for column in table.columns:
            to = ", ".join(f"`{key.target_fullname}`" for key in column.foreign_keys)
            kind, null = repr(column.type).partition("(")[0], "yes" if column.nullable else ""
            rows.append((f"`{column.name}`", kind, null, to, said.get((table.name, column.name), "")))
        parts += [f"## {table.name}", _table(("column", "type", "may be null", "refers to", "meaning"), rows)]
    return _page("Tables", *parts)


def meanings() -> dict[tuple[str, str], str]:
    """The comment beside or above each column of the schema, by table and column. Those without one are left out."""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for table in ast.walk(ast.parse(source)):
        if isinstance(table, ast.Call) and ast.unparse(table.func) == "Table":
            for column in (one for one in table.args if isinstance(one, ast.Call)):
                above = comments.get(column.lineno - 1)
                alone = above is not None and above.line.strip() == above.string
                lines = range(column.lineno - alone, (column.end_lineno or column.lineno) + 1)
                text = " ".join(comments[line].string.lstrip("# ") for line in lines if line in comments)
                if ast.unparse(column.func) == "Column" and text:
                    found[ast.literal_eval(table.args[0]), ast.literal_eval(column.args[0])] = text
    return found
