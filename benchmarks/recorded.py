"""Groups of rollouts of random tokens, as the pool gives them to the trainer, for the benchmarks of steps.

Left out: a database. The pool's part of a step is a few queries (docs/performance.md).
"""

import random
from array import array
from dataclasses import dataclass, replace
from zlib import crc32

from proxy.pool.completions.records import Completion, VersionSpan, int_bytes
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The size of a batch of agents' work."""

    groups: int
    members: int
    turns: int
    prompt: int
    """Tokens of system prompt and task, which the members of a group share."""
    observed: int
    """Tokens of a tool's answer, before each turn after the first."""
    sampled: int
    """Sampled tokens of each turn."""
    vocabulary: int = 2048


def make_groups(play: Workload, separate: bool = False, seed: int = 0) -> list[LeasedGroup]:
    """The groups of a workload. `separate`: each completion alone, as if it were its rollout's only one."""
    draw = random.Random(seed)
    groups = []
    for number in range(play.groups):
        prompt = [draw.randrange(play.vocabulary) for _ in range(play.prompt)]
        members: list[LeasedRollout] = []
        for member in range(play.members):
            calls = _calls(play, prompt, draw)
            chains = [[_alone(call, path)] for call, path in calls] if separate else [[call for call, _ in calls]]
            reward = float(member % 2)
            members += [LeasedRollout(len(members) + i, member, reward, None, chain) for i, chain in enumerate(chains)]
        groups.append(LeasedGroup(number, number, {"id": "t", "domain": "agent"}, 0, members))
    return groups


def _calls(play: Workload, prompt: list[int], draw: random.Random) -> list[tuple[Completion, list[int]]]:
    """The completions of a history that only grows, each with its whole path."""
    completions: list[tuple[Completion, list[int]]] = []
    path: list[int] = []
    for turn in range(play.turns):
        new = list(prompt) if turn == 0 else [draw.randrange(play.vocabulary) for _ in range(play.observed)]
        sampled = [draw.randrange(play.vocabulary) for _ in range(play.sampled)]
        before = len(path)
        path = [*path, *new, *sampled]
        call = Completion(
            id=turn + 1,
            ordinal=turn,
            attempt_id=1,
            prefix_of=turn or None,
            prefix_length=before,
            prompt_tail=array("i", new),
            sampled=array("i", sampled),
            logprobs=array("f", [-7.6] * len(sampled)),
            versions=(VersionSpan("v1", 0, len(sampled)),),
            finish_reason="stop",
            reply={},
            path_crc=crc32(int_bytes(path)),
            started_at=0,
            finished_at=0,
        )
        completions.append((call, path))
    return completions


def _alone(call: Completion, path: list[int]) -> Completion:
    tail = array("i", path[: len(path) - len(call.sampled)])
    return replace(call, id=1, ordinal=0, prefix_of=None, prefix_length=0, prompt_tail=tail)
