"""A judge file (TOML): the rubric, the models that grade whole trajectories by it, and how they agree."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.settings_file import Count, FilePath, Share, checked, demand, read_table, with_absolute_paths

MAX_RUBRIC = 20_000
"""Characters of a rubric."""


class JudgeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[judges]] of the file."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    """Its name: litellm's (`openai/gpt-4o`), or with `url` the endpoint's own."""
    url: str = ""
    """OpenAI-compatible endpoint, ending in /v1. Empty: the one that litellm knows for the model."""
    key_file: FilePath = ""
    """File with its API key. Empty: the key that litellm finds in the environment."""
    answers: Literal["chat", "classify"] = "chat"
    """chat: with {"score": x}. classify: `url`/classify says the classes' probabilities, of which the last counts, or
    of a reward model with one class its number."""

    def __post_init__(self) -> None:
        demand(
            self.answers == "chat" or bool(self.url),
            f"the judge {self.model} answers by classify, which needs its endpoint; name it with url",
        )
        demand(
            not self.url or self.url.startswith(("http://", "https://")),
            f"the judge's url = {self.url} is no http URL; write one that begins with http:// or https://",
        )


class JudgeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    judges: Annotated[tuple[JudgeModel, ...], msgspec.Meta(min_length=1)]
    rubric: str = ""
    """What makes a rollout good."""
    agreement: Literal["mean", "majority"] = "mean"
    """mean: of all judges' scores. majority: 1 where more than half of the judges score at least 0.5, 0 where more than
    half score less."""
    disagreement: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """Largest distance of scores that `mean` takes; scores that are further apart are no verdict."""
    weight: Share = 1.0
    """Share of the judges in the reward; the rest is the verifier's. Below 1 a rollout needs both."""
    concurrency: Count = 8
    """Maximum questions at once."""


def load_judge_file(path: Path, otherwise: str = "") -> JudgeFile:
    """Read a judge file, with its rubric; UserError names what is wrong. `otherwise`: the rubric of a file without."""
    table = read_table(path)
    file = checked(with_absolute_paths(table, JudgeFile, path.parent), JudgeFile, str(path))
    rubric = file.rubric if file.rubric.strip() else otherwise
    if not rubric.strip():
        raise UserError(f"{path}: the rubric is empty; say in `rubric` what makes a rollout good")
    if len(rubric) > MAX_RUBRIC:
        raise UserError(f"{path}: the rubric has {len(rubric)} characters, and {MAX_RUBRIC} are read; shorten it")
    models = tuple(
        msgspec.structs.replace(each, key_file=each.key_file and str((path.parent / each.key_file).absolute()))
        for each in file.judges
    )
    return msgspec.structs.replace(file, rubric=rubric, judges=models)


def key_of(model: JudgeModel) -> str:
    """Return a judge's API key, "" where it names no file; UserError when the file cannot be read or is empty."""
    if not model.key_file:
        return ""
    try:
        key = Path(model.key_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"the key of the judge {model.model} cannot be read ({error}); correct key_file") from error
    if not key:  # without a key, litellm would take one from the environment in silence
        raise UserError(f"the key of the judge {model.model} is empty; write it into {model.key_file}")
    return key
