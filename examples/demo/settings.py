"""The demo's settings, and the configuration files that the commands read."""

from dataclasses import dataclass
from pathlib import Path

RUN = "train"
"""Name of the reinforcement run in the pool."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The demo's settings. Tasks, teacher and model are in tasks.py, teacher.py and proxy/engine/tiny_model.py."""

    seed: int = 0
    control: bool = False
    """Shuffle the rewards within each group, so that nothing can be learned from them."""
    steps: int = 50
    """Reinforcement steps of `groups` groups of `group_size` rollouts."""
    episodes: int = 256
    """Held-out tasks that each of the two evaluations runs once."""
    groups: int = 8
    group_size: int = 8
    lessons: int = 2
    """Recorded teacher rollouts per task. With only one, the model memorises the teacher's mistakes."""
    max_turns: int = 2
    """Model calls per rollout: one to read the note, one to do what it says."""
    concurrency: int = 16
    """Rollouts that run at once."""


ENGINE = """\
pool = "pool.db"

[engine]
model = "{model}"
dtype = "float32"
context_length = 2048
extra_args = ["--max-total-tokens", "65536"]

[sampling]
max_new_tokens = 64
"""

TRAINER = """\
pool = "{directory}/pool.db"
run = "{run}"
model = "{directory}/warm"
output = "{directory}/policy"
steps = {steps}

[batch]
groups = {groups}
schedule = "overlap"  # rollouts of this task take equally long, so a window of one batch costs nothing
max_tokens = 4096

[optimizer]
lr = 2e-4
warmup_steps = 3
eps = 1e-5

[push]
engines = ["{engine}"]

[credit]
shuffle_rewards = {shuffle}
"""

SFT = """\
pool = "{directory}/pool.db"
run = "{run}"
model = "{directory}/tiny"
output = "{directory}/policy"

[optimizer]
eps = 1e-8

[sft]
runs = ["teacher"]
output = "{directory}/warm"
batch = 16
max_steps = 300
stop_loss = 0.036
"""


def write_engine_config(directory: Path, model: str) -> Path:
    """Write the file that `proxy engine` and `proxy serve` read. `model`: one of the demo's model directories."""
    return _write(directory / f"engine-{model}.toml", ENGINE.format(model=model))


def write_sft_config(directory: Path, settings: Settings) -> Path:
    """Write the file that `trainer sft` reads."""
    return _write(directory / "sft.toml", SFT.format(directory=directory, run=RUN))


def write_trainer_config(directory: Path, settings: Settings, engine: str) -> Path:
    """Write the file that `trainer launch` and `trainer logprobs` read."""
    text = TRAINER.format(
        directory=directory,
        run=RUN,
        steps=settings.steps,
        groups=settings.groups,
        engine=engine,
        shuffle=str(settings.control).lower(),
    )
    return _write(directory / "trainer.toml", text)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
