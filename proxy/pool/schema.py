"""The tables, declared once. A change of them needs a migration (proxy/pool/migrations).

Times are unix seconds. Token arrays are little-endian int32, logprobs little-endian float32, both only what is new
against the `prefix_of` completion. Text written by agents and engines is `FreeText`. Of requests, only the input of
Responses calls is stored, unless they forbid it, and the ends of tool results; a completion keeps its own reply.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    case,
    func,
    null,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from proxy.pool.compressed_json import CompressedJson


def storable(text: str) -> str:
    """Return a text with a mark in place of what UTF-8 cannot store: lone surrogates."""
    return text.encode(errors="replace").decode()


class FreeText(TypeDecorator[str]):
    """Text of any origin. What UTF-8 or PostgreSQL cannot store (lone surrogates, NUL) is replaced."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return storable(value).replace("\0", "\N{REPLACEMENT CHARACTER}")


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),  # unique in the pool: the run is called by it
    Column("purpose", Text, nullable=False),  # train | eval | collect
    Column("config", JSON, nullable=False),  # the settings that may not change when it is resumed
    Column("queue_limit", Integer),  # groups that may be open at once; null: no trainer has set a limit
    Column("lease_groups", Integer),  # groups that a train step takes; null: no trainer has said
    Column("directory", Text),  # where the newest harness keeps its files, absolute, on its machine; null: not known
    Column("lease_window", Integer),  # groups, from the oldest waiting one, among which it takes them; null: among all
    Column("created_at", Float, nullable=False),
    # The harness that works on it (proxy/pool/processes/owners.py); null: none.
    Column("owner", JSON(none_as_null=True)),
    Column("owner_seen_at", Float),  # its last heartbeat
    # The trainer that works on it. Its token guards what a trainer writes (`demand_trainer`). null: none.
    Column("trainer", JSON(none_as_null=True)),
    Column("trainer_seen_at", Float),  # the trainer's last heartbeat
    Column("settled", JSON(none_as_null=True)),  # the sums of its settled groups (proxy/pool/training/settled.py)
    CheckConstraint("purpose in ('train', 'eval', 'collect')", name="ck_runs_purpose"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("name", Text, nullable=False),  # the task's id
    Column("domain", Text, nullable=False),  # by which rewards are averaged and mixes are made
    Column("spec", JSON, nullable=False),  # the task itself (harness/tasks/schema.py)
    UniqueConstraint("run_id", "name"),
)


ROWS = "rows"
"""Key of a partial index's condition in its `info`. A new pool gives the condition to its database's dialect.

`postgresql_where` would load PostgreSQL's dialect in every process, also where pools are in SQLite.
"""


def _partial(column: str) -> Index:
    """Return an index of those of a run's groups that have a value in a column, by this value."""
    return Index(f"ix_groups_{column}", "run_id", column, info={ROWS: text(f"{column} is not null")})


groups = Table(
    "groups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("queue_index", Integer, nullable=False),  # its number in the run
    Column("position", Integer),  # its number among the groups that are queued for training; null: held out
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("size", Integer, nullable=False),  # rollouts whose rewards are compared, without redundant ones
    Column("state", Text, nullable=False),  # changed by proxy/pool/rollouts/states.py alone
    Column("step", Integer),  # the train step of LEASED and CONSUMED
    Column("reason", Text),  # why a TOMBSTONE is one (proxy/pool/untrained.py)
    Column("detail", FreeText),  # what is particular about the reason
    Column("agent", Text),  # its name in the run; null: the run has one agent
    Column("purpose", Text),  # eval: held out, never queued for a trainer; null: the run's
    Column("failure", Text),  # set: lost to failures of this kind
    Column("replaces", Integer),  # the group, opened in the run's order, in whose place this one is
    Column("place", Integer),  # of its task in the line of its source; null: in its run none is skipped
    Column("max_tokens", Integer),  # that each of its attempts may sample; null: it sets no limit
    # The recorded attempt that its attempts begin with (proxy/pool/rollouts/starts.py); null: none.
    Column("start_attempt_id", Integer),  # no reference: the row stays when the recorded attempt leaves the pool
    Column("start_turns", Integer),  # how many of its turns are replayed; 0: none, they begin where it began
    Column("start_dated_at", Float),  # the time that chat templates read, as it was in the recorded attempt
    Column("function", Text),  # the user's function that was asked about its rollouts when it was leased; null: none
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),  # when its last rollout was finished
    Column("settled", Integer),  # 1: runs.settled counts its tokens, which stay where they are unless it is reopened
    Column("archive_id", Integer),  # the archive that holds its completions; null: none does
    Column("dropped_at", Float),  # set: the pool does not hold them any more
    UniqueConstraint("run_id", "queue_index"),
    Index(None, "run_id", "position", unique=True),
    Index(None, "run_id", "state", "purpose"),
    Index(None, "run_id", "finished_at", "id"),
    Index(None, "task_id"),
    _partial("step"),
    _partial("failure"),
    _partial("replaces"),
    _partial("start_attempt_id"),
    Index("ix_groups_unsettled", "run_id", info={ROWS: text("settled is null")}),
    CheckConstraint("state in ('RUNNING', 'DONE', 'LEASED', 'CONSUMED', 'TOMBSTONE')", name="ck_groups_state"),
    CheckConstraint("(step is not null) = (state in ('LEASED', 'CONSUMED'))", name="ck_groups_step"),
    CheckConstraint("purpose = 'eval'", name="ck_groups_purpose"),
    CheckConstraint("(position is null) = (purpose is not null)", name="ck_groups_position"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("member", Integer, nullable=False),  # 0 .. group size - 1
    Column("attempt_id", Integer),  # the attempt whose outcome this is; null while running
    Column("weight", Float),  # in the loss, by the function of its group; null: 1
    Column("left_out", Text),  # why its lease leaves it out (proxy/pool/untrained.py), with details; null: it does not
    Column("set_aside", FreeText),  # set: that function drops it, or failed on it; the function's name, and how
    Column("completions_left_out", JSON(none_as_null=True)),  # ids of those that this function leaves out; null: none
    Column("reward", Float),  # null is missing, never 0
    Column("reward_parts", JSON),  # name -> number, where the reward has parts
    # Earlier outcomes, each with what replaced it (proxy/pool/rollouts/scoring.py).
    Column("replaced", JSON(none_as_null=True)),
    Column("failure", Text),  # a kind of proxy/pool/rollouts/failures.py
    Column("detail", FreeText),  # what is particular about the failure
    Column("finished_at", Float),  # when it had its outcome; null: it runs
    # What detectors of reward hacking and a judge say (harness/integrity).
    Column("hacked", Text),  # tell | mask | zero: it cheated, and what becomes of it; null: nobody says so
    Column("integrity", JSON(none_as_null=True)),  # findings, and the reward before; null: nobody looked
    # Figures of its attempt (proxy/pool/rollouts/counts.py). null: it was finished before there were any, or when the
    # attempt was still open.
    Column("completions", Integer),  # model calls
    Column("sampled_tokens", Integer),  # by the model, in all of them
    Column("trainable_tokens", Integer),  # of these, those that a step may train
    Column("versions", JSON(none_as_null=True)),  # of the weights that sampled them
    Column("behaviour", JSON(none_as_null=True)),  # figures for process rewards (proxy/pool/training/unequal.py)
    UniqueConstraint("group_id", "member"),
    CheckConstraint("reward between -1e308 and 1e308", name="ck_rollouts_reward"),  # finite
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id")),  # null: a session outside any run
    Column("rollout_id", ForeignKey("rollouts.id")),
    Column("number", Integer, nullable=False),  # 0 is the first attempt of the rollout
    Column("key_hash", Text, nullable=False, unique=True),  # of the key that the agent calls the proxy with
    Column("agent", Text, nullable=False),  # its kind
    Column("failure", Text),  # a kind of proxy/pool/rollouts/failures.py; null: none
    Column("detail", FreeText),  # what is particular about the failure
    Column("timings", JSON),  # seconds of each stage
    Column("augmentation", JSON),  # list of `kind=value`: what its environment had otherwise than its task's
    # {kinds, seed}: what its model is shown otherwise; null: nothing.
    Column("prompt_variation", JSON(none_as_null=True)),
    Column("exit_code", Integer),  # of the agent's command
    Column("opened_at", Float, nullable=False),  # when its key was issued
    Column("closed_at", Float),  # set: the key is revoked
    Column("sampled_tokens", Integer),  # of all its completions; null: it is open
    Column("replayed_tokens", Integer),  # of its answers that were recorded before; null: it is open, or older
    Column("differed", FreeText),  # how a request differs from the recorded attempt that it begins with
    Column("max_turns", Integer),  # model calls that it may make; null: no limit
    Column("max_tokens", Integer),  # tokens that it may sample
    Column("spent", Text),  # turns | tokens: a call was refused because these are used up
    Column("trouble", FreeText),  # why the last call failed that was no fault of its client
    Column("trouble_at", Float),  # when that call failed
    Column("failed_calls", JSON(none_as_null=True)),  # [[begin, end], ...] of calls that failed like that; null: none
    Index(None, "rollout_id"),
    Index(None, "run_id"),
)

proxies = Table(
    "proxies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("owner", JSON, nullable=False),  # the process (proxy/pool/processes/owners.py)
    Column("seen_at", Float, nullable=False),  # its last heartbeat
    Column("confirmed", Integer, nullable=False),  # its answers up to this id arrived or are marked, except on_the_way
    Column("on_the_way", JSON, nullable=False),  # ids of answers that are neither
    Column("ended_at", Float),  # set: nothing of it is in doubt any more
    Column("tokenizer", Text),  # the fingerprint of its ids (proxy/pool/tokenizer_fingerprint.py); null: not known
)

completions = Table(
    "completions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("attempt_id", ForeignKey("attempts.id"), nullable=False),
    Column("ordinal", Integer, nullable=False),  # its number in the attempt
    Column("prefix_of", ForeignKey("completions.id")),  # the completion with whose path its prompt begins; null: none
    Column("prefix_length", Integer, nullable=False),  # with how many tokens of that path
    Column("follows", ForeignKey("completions.id")),  # the completion whose reply its request continues; null: none
    Column("prompt_tail", LargeBinary, nullable=False),  # token ids of the prompt behind these
    Column("sampled", LargeBinary, nullable=False),  # token ids of the answer
    Column("given", JSON(none_as_null=True)),  # [[start, end], ...] of `sampled` that the proxy wrote; null: nothing
    Column("logprobs", LargeBinary, nullable=False),  # of the tokens that are not given, like `versions`
    Column("versions", JSON, nullable=False),  # [[version, start, end], ...]
    Column("finish_reason", Text, nullable=False),  # stop | tool_calls | length | repetition | abort | error
    Column("untrainable", Text),  # why it is not trained (proxy/pool/untrained.py); null: it may be
    Column("untrainable_detail", FreeText),  # what is particular about that reason
    Column("reply", CompressedJson, nullable=False),  # the assistant message as the agent saw it
    Column("path_crc", BigInteger, nullable=False),  # CRC32 of the whole path, prompt and answer
    Column("proxy_id", Integer),  # who delivers it; null: nobody keeps account of that
    Column("fingerprint", LargeBinary),  # of the request (proxy/recording/redelivery/fingerprint.py)
    Column("started_at", Float, nullable=False),  # when the proxy had the request
    Column("finished_at", Float, nullable=False),  # when the answer was whole
    Column("queued_seconds", Float),  # of these, waited for a place and for an engine; null: not known, or replayed
    Column("shape", JSON(none_as_null=True)),  # what the label is made from (RequestShape)
    # Of what is new (proxy/pool/completions/routed_experts.py); null: none were asked for, or none came.
    Column("experts", LargeBinary),
    Column("misfit", FreeText),  # how it misses its prescribed form (proxy/pool/completions/records.py)
    Column("observed", LargeBinary),  # what its request showed (proxy/pool/completions/observed.py); null: not known
    Column("label", Text),  # main | subagent | side | compaction; null: the attempt is open, or older than labels
    Index(None, "prefix_of"),  # by these two a database finds, when a completion is deleted, whether one refers to it
    Index(None, "follows"),
    UniqueConstraint("attempt_id", "ordinal"),
)

responses = Table(
    "responses",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("attempt_id", ForeignKey("attempts.id"), nullable=False),
    Column("completion_id", ForeignKey("completions.id"), nullable=False),  # its answer
    Column("response_id", Text, nullable=False),  # what clients call it
    Column("previous", Text),  # the response_id that the client named
    Column("prefix_of", Text),  # the response_id of one with whose context the input begins
    Column("prefix_length", Integer, nullable=False),  # how many of that one's items it begins with
    Column("items", CompressedJson, nullable=False),  # the items of the input behind these
    # What the response repeats of the request; JSON's null: the same as another's.
    Column("fields", CompressedJson, nullable=False),
    Column("fields_of", Text),  # the response_id of the other one that has them
    Column("usage", JSON, nullable=False),  # tokens, as the client was told
    Column("created_at", Float, nullable=False),
    Column("deleted_at", Float),  # set: clients can no longer name it
    Index(None, "completion_id"),  # for deletions, like those of completions
    UniqueConstraint("attempt_id", "response_id"),
)

archives = Table(
    "archives",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("file", Text, nullable=False, unique=True),  # of proxy/pool/read/archive_file.py; its absolute path
    Column("created_at", Float, nullable=False),
)

undelivered = Table(
    "undelivered",
    metadata,
    Column("completion_id", ForeignKey("completions.id"), primary_key=True),  # whole answers that did not arrive
    Column("attempt_id", ForeignKey("attempts.id"), nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),  # of the request, by which a retry finds its answer
    Column("claimed_by", ForeignKey("proxies.id")),  # null: nobody is serving it again
    Index(None, "attempt_id"),
)

TOKENS = func.length(completions.c.sampled, type_=Integer) // 4
"""Number of tokens of a completion's answer."""
GIVEN_TOKENS = {
    "sqlite": "(select sum(json_extract(value, '$[1]') - json_extract(value, '$[0]')) from json_each({given}))",
    "postgresql": "(select cast(sum(cast(span ->> 1 as integer) - cast(span ->> 0 as integer)) as integer) "
    "from json_array_elements({given}) as span)",
}
"""Database -> SQL of the number of tokens in the spans of the column `{given}`."""


class _GivenTokens(FunctionElement[int]):
    """The number of tokens of a completion's answer that the proxy wrote.

    It is a function, because SQLAlchemy 2.1 compiles a query with any other custom element again on every run.
    """

    inherit_cache = True
    type = Integer()


@compiles(_GivenTokens)
def _given_tokens(_element: _GivenTokens, compiler: SQLCompiler, **_: Any) -> str:
    return GIVEN_TOKENS[compiler.dialect.name].format(given="completions.given")


SAMPLED_TOKENS = case((completions.c.given.is_(null()), TOKENS), else_=TOKENS - _GivenTokens())
"""Number of tokens that the model sampled: all but the given ones, also where logprobs are missing."""

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("step", Integer, nullable=False),  # 0: the initial weights
    Column("checkpoint", Text, nullable=False),  # the trainer's directory to go on from
    Column("hf_dir", Text, nullable=False),  # the same weights for engines
    Column("created_at", Float, nullable=False),
    Column("pushed_at", Float),  # when the engines had it; null: not yet
    Column("retired_at", Float),  # set by a rollback to an earlier step
    Index(None, "run_id", "step"),
    sqlite_autoincrement=True,  # ids name weight versions in engines and are never reused
)

train_steps = Table(
    "train_steps",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("version_id", ForeignKey("policy_versions.id"), nullable=False, unique=True),
    Column("metrics", JSON, nullable=False),  # by name (docs/training.md)
    # Its sums (proxy/pool/training/fates.py: StepSums); null: older than they.
    Column("fates", JSON(none_as_null=True)),
    Column("so_far", JSON(none_as_null=True)),  # these sums of this step and of those that it grew from; null: older
    Column("scales", JSON(none_as_null=True)),  # running deviations by domain (trainer/credit/scales.py); null: none
)

fates = Table(
    "fates",
    metadata,
    Column("completion_id", ForeignKey("completions.id"), primary_key=True),
    Column("version_id", ForeignKey("policy_versions.id"), nullable=False),  # of the last step that took it
    Column("trained", Integer, nullable=False),  # tokens of the answer
    Column("left_out", JSON, nullable=False),  # the others: reason -> tokens
)

imitated = Table(
    "imitated",
    metadata,
    Column("completion_id", Integer, primary_key=True),  # no reference: the row stays when the completion leaves
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("rollout_id", Integer, nullable=False),  # the rollout of that completion
    Column("tokens", Integer, nullable=False),  # that a warm start learned from (proxy/pool/training/imitation.py)
    Index(None, "run_id"),
)

interventions = Table(
    "interventions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("at", Float, nullable=False),  # when it was done
    Column("rule", Text, nullable=False),  # of the monitor, or who asked for it
    Column("action", Text, nullable=False),  # pause | rollback | drop_task
    Column("version_id", Integer),  # of the step whose figures were the cause; null: a person asked
    Column("task_id", ForeignKey("tasks.id")),  # the dropped task
    Column("detail", FreeText, nullable=False),  # what broke the rule, or who asked
    Column("ended_at", Float),  # of a pause: when a person ended it
    Index(None, "run_id", "action"),
    Index(None, "task_id"),
)

judgements = Table(
    "judgements",
    metadata,
    Column("key", Text, primary_key=True),  # digest of the model and of all that it was shown
    Column("model", Text, nullable=False),  # the judge's, as litellm names it
    Column("score", Float, nullable=False),  # 0 to 1
    Column("reason", FreeText, nullable=False),  # the judge's words
    Column("created_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id")),
    Column("at", Float, nullable=False),  # when it was noted
    Column("kind", Text, nullable=False),  # push | rollback | monitor | alarm | ...
    Column("detail", FreeText, nullable=False),  # one sentence
)
