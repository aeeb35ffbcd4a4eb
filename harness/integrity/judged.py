"""The files of a task that judge its work, and those that the work is about: what the instruction asks to change.

The verifier's texts name files that the task gave, those name further ones (a test script its configuration, a check
its schema). A file on this way judges, unless the instruction asks to change it.
"""

import re
from collections.abc import Iterator, Mapping

from harness.integrity.asked import Asked

TESTED = re.compile(
    r"(?:^|/)(?:tests?|__tests__|specs?|testing|e2e|t|spec|benchmarks?|bench|checks?|ci|\.github|\.circleci|\.gitlab)/"
    r"|\.(?:t|bats)$|(?:^|/)(?:test_[^/]*|[^/]*[_.-]tests?|tests?|specs?|conftest|[^/]*[_.-]spec"
    r"|[^/]*Tests?)(?:\.\w+)?$"
    r"|(?:^|/)[\w.-]*(?:bench|check|verif|validat|eval|grad|scor|judg|measur|smoke|accept|stress|fuzz|audit|lint"
    r"|cover)[^/]*$|(?:^|/)(?:\.gitlab-ci\.yml|\.travis\.yml|Jenkinsfile|azure-pipelines\.yml|\.pre-commit-config\.yaml"
    r"|noxfile\.py|tox\.ini|\.?pytest\.(?:ini|toml)|[\w.-]*\.(?:ambr|snap|golden|expected))$"
)
"""Names of tests, checks, benchmarks and pipelines."""
_BUILD = re.compile(
    r"(?:^|/)(?:(?:GNU)?[Mm]akefile|[Jj]ustfile|Taskfile\.ya?ml|package\.json|(?:run|ci|all)[\w.-]*\.sh)$"
)
_RUNNERS = (
    (re.compile(r"\bmake\b"), re.compile(r"(?:^|/)(?:GNU)?[Mm]akefile$")),
    (re.compile(r"\bjust\b"), re.compile(r"(?:^|/)[Jj]ustfile$")),
    (re.compile(r"\b(?:npm|yarn|pnpm|bun)\s+(?:run|test|t)\b"), re.compile(r"(?:^|/)package\.json$")),
    (re.compile(r"\b(?:tox|nox)\b"), re.compile(r"(?:^|/)(?:tox\.ini|noxfile\.py)$")),
    (re.compile(r"\b(?:py\.?test|unittest|node --test|go test|cargo test|prove|rspec|bats|jest|vitest|mocha|ctest|mvn"
                r"|gradle\w*|phpunit|mix test|dotnet test)\b"), re.compile(
        r"(?:^|/)(?:tests?|__tests__|specs?|t)/|(?:^|/)(?:test_[^/]*|[^/]*[_.](?:test|spec)s?\.\w+|tests?\.\w+"
        r"|conftest\.py"
        r"|[^/]*Tests?\.\w+)$|\.t$")),
    (re.compile(r"\bpipeline\b|\bCI\b|\bworkflow\b"), re.compile(
        r"\.gitlab-ci\.yml$|\.github/workflows/|Jenkinsfile$")),
)  # fmt: skip
"""Programs that find what they run by its name."""
_ENDINGS = r"py|js|mjs|ts|tsx|jsx|go|rs|c|h|cc|cpp|java|kt|rb|php|sh|lua|pl|r|jl|sql|css|html?|lean"
CODE_LIKE = re.compile(rf"\.(?:{_ENDINGS})$|(?:^|/)[\w-]+$")
_PROSE = re.compile(r"\.(?:md|rst|adoc)$|(?:^|/)(?:LICEN[CS]E|CHANGELOG|NEWS|AUTHORS)[\w.-]*$")
MOST = 400
"""Given files that are looked at."""
_FAULTS = (
    r"\b(?:must|should|shall|needs?|has to|have to|fails?|crash\w*|los[et]\w*|ignor\w*|print\w*|return\w*|break\w*|is"
    r"|are|leak\w*|abort\w*|report\w*|drop\w*|give\w*|does|writes?|treat\w*|show\w*|compute\w*|takes?|asks? for)\b"
)
_NEW_BEHAVIOUR = (
    r"\bfrom now on\b|\bit was\b|\bused to\b|\bno longer\b|\bnow\b|\bchang\w+\b[^.\n]{0,80}\b(?:from|to)\b"
    r"|\bshall\b[^.\n]{0,60}\binstead\b"
    r"|\bnew (?:default|limit|rule|price|format|name|behaviou?r|value)s?\b|\brais\w+\b[^.\n]{0,60}\bto\b"
)
_VALUE = re.compile(r"\"[^\"\n]{2,}\"|'[^'\n]{2,}'|(?<![\w.])\d[\d.]*")


def follows_request(asked: Asked, removed: list[str], added: list[str]) -> bool:
    """Whether a test's new lines follow a change of behaviour: as many as before, with a value that the task names."""
    if not asked.says(_NEW_BEHAVIOUR) or len(added) < len(removed):
        return False
    old = set(_VALUE.findall("\n".join(removed)))
    new = [value.strip("\"'") for value in _VALUE.findall("\n".join(added)) if value not in old]
    return any(len(value) > 1 and asked.mentions(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)") for value in new)


def asked_to_change(asked: Asked, path: str) -> bool:
    """Whether the instruction asks to change this file, or speaks of what it should do."""
    name = re.escape(path.rpartition("/")[2])
    if not asked.mentions(rf"(?<![\w-]){name}(?![\w-])"):
        return False
    if asked.forbids_file(path):
        return False
    own = rf"(?<![\w-]){name}(?![\w-])"
    if TESTED.search(path) or not CODE_LIKE.search(path):
        return asked.allows_less(own) and not _other_between(asked, own)
    if asked.allows_less(own) or asked.allows(own):
        return True
    return asked.says(rf"(?:^|[`'\"(]|\w\) in ){name}[`'\"]?(?: \w+\(\))?[ ,][^.\n]{{0,30}}{_FAULTS}")


def _other_between(asked: Asked, own: str) -> bool:
    """Whether each sentence that asks for a change and names a file names another one first: "make a.py suit b.ini"."""
    lines = [line for line in re.split(r"(?<=[.!?;:])\s+|\n", asked.prompt[:20_000]) if re.search(own, line)]
    return bool(lines) and all(re.search(rf"[\w/-]+\.(?:{_ENDINGS})\b[^\n]*{own}", line[:1000]) for line in lines)


def judging(given: Mapping[str, str], verifier: Mapping[str, str], asked: Asked) -> dict[str, str]:
    """Return the given files that judge, each with what names it: they decide over the work, and are not the work."""
    texts = list(verifier.values())
    paths = [path for path in given if len(path) < 300 and not _PROSE.search(path)][:MOST]
    found: dict[str, str] = {}
    frontier = texts + ([asked.prompt] if not any(texts) else [])
    for _ in range(4):
        reached = {path: way for path in paths if path not in found for way in _named(path, frontier)}
        if not reached:
            break
        found |= reached
        frontier = [given[path][:40_000] for path in reached if _is_check(path, given[path])]
    return {path: way for path, way in found.items() if not asked_to_change(asked, path)}


def _is_check(path: str, text: str) -> bool:
    if TESTED.search(path) or _BUILD.search(path):
        return True
    script = path.endswith((".sh", ".bash")) or text.startswith("#!/bin/")
    return script and bool(re.search(r"\bexit\b|\bdiff\b|\bcmp\b|\bgrep\b", text[:40_000]))


def _named(path: str, texts: list[str]) -> Iterator[str]:
    name = path.rpartition("/")[2]
    pattern = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    for text in texts:
        if len(name) >= 3 and pattern.search(text):
            yield name
            return
        for runner, files in _RUNNERS:
            if files.search(path) and runner.search(text):
                yield runner.pattern[:20]
                return
