"""Views of the tables for people and other programs: names instead of ids, counts and lengths instead of token arrays.

docs/pool.md lists their columns. They are dropped before every migration, so that none stands in the way of a change of
its tables, and made again after it. A change of a view therefore needs a migration too, which may be empty.
"""

from sqlalchemy import Connection, text

from proxy.pool.schema import GIVEN_TOKENS

# Subqueries for each row, not joins with grouped tables: a reader who asks for one run or group pays for that one only.
VIEWS = {
    "v_runs": """
select runs.name as run, runs.purpose, runs.created_at,
    (select count(*) from tasks where tasks.run_id = runs.id) as tasks,
    (select count(*) from groups where groups.run_id = runs.id) as groups,
    (select count(*) from groups where groups.run_id = runs.id and groups.state = 'RUNNING') as groups_running,
    (select count(*) from groups where groups.run_id = runs.id and groups.state = 'DONE') as groups_done,
    (select count(*) from groups where groups.run_id = runs.id and groups.state = 'LEASED') as groups_leased,
    (select count(*) from groups where groups.run_id = runs.id and groups.state = 'CONSUMED') as groups_consumed,
    (select count(*) from groups where groups.run_id = runs.id and groups.state = 'TOMBSTONE') as groups_dropped,
    (select count(*) from rollouts join groups on groups.id = rollouts.group_id
        where groups.run_id = runs.id) as rollouts,
    (select count(rollouts.reward) from rollouts join groups on groups.id = rollouts.group_id
        where groups.run_id = runs.id) as rewards,
    (select avg(rollouts.reward) from rollouts join groups on groups.id = rollouts.group_id
        where groups.run_id = runs.id) as reward_mean,
    (select count(*) from attempts where attempts.run_id = runs.id) as attempts,
    (select count(*) from completions join attempts on attempts.id = completions.attempt_id
        where attempts.run_id = runs.id) as completions,
    (select max(step) from policy_versions
        where policy_versions.run_id = runs.id and policy_versions.retired_at is null) as step
from runs
""",
    "v_groups": """
select runs.name as run, groups.id as group_id, groups.queue_index, tasks.name as task, tasks.domain, groups.state,
    groups.step, groups.reason, groups.detail, groups.failure, groups.agent,
    case when groups.purpose = 'eval' then 1 else 0 end as held_out, groups.size,
    (select count(*) from rollouts where rollouts.group_id = groups.id) as rollouts,
    (select count(rollouts.finished_at) from rollouts where rollouts.group_id = groups.id) as finished,
    (select count(rollouts.reward) from rollouts where rollouts.group_id = groups.id) as rewards,
    (select avg(rollouts.reward) from rollouts where rollouts.group_id = groups.id) as reward_mean,
    (select min(rollouts.reward) from rollouts where rollouts.group_id = groups.id) as reward_min,
    (select max(rollouts.reward) from rollouts where rollouts.group_id = groups.id) as reward_max,
    groups.created_at, groups.finished_at,
    (select file from archives where archives.id = groups.archive_id) as archive, groups.dropped_at
from groups
join runs on runs.id = groups.run_id
join tasks on tasks.id = groups.task_id
""",
    "v_rollouts": """
select runs.name as run, groups.id as group_id, groups.queue_index, tasks.name as task, tasks.domain,
    groups.state as group_state, groups.step, rollouts.id as rollout_id, rollouts.member,
    rollouts.attempt_id, final.agent, rollouts.reward, rollouts.failure, rollouts.detail, rollouts.finished_at,
    final.closed_at - final.opened_at as seconds,
    (select count(*) from attempts where attempts.rollout_id = rollouts.id) as attempts,
    (select count(*) from completions where completions.attempt_id = rollouts.attempt_id) as completions,
    (select count(*) from completions
        where completions.attempt_id = rollouts.attempt_id and completions.untrainable is null) as trainable,
    (select sum(length(completions.sampled) / 4 - coalesce({given}, 0)) from completions
        where completions.attempt_id = rollouts.attempt_id) as sampled_tokens
from rollouts
join groups on groups.id = rollouts.group_id
join runs on runs.id = groups.run_id
join tasks on tasks.id = groups.task_id
left join attempts final on final.id = rollouts.attempt_id
""",
    "v_completions": """
select runs.name as run, groups.id as group_id, groups.queue_index, tasks.name as task, tasks.domain,
    rollouts.id as rollout_id, rollouts.member, attempts.id as attempt_id,
    case when rollouts.attempt_id = attempts.id then 1 else 0 end as final, attempts.agent,
    completions.id as completion_id, completions.ordinal, completions.follows, completions.prefix_of,
    completions.label, completions.finish_reason, completions.untrainable, completions.untrainable_detail,
    completions.misfit,
    completions.prefix_length + length(completions.prompt_tail) / 4 as prompt_tokens,
    length(completions.prompt_tail) / 4 as new_prompt_tokens,
    length(completions.sampled) / 4 as answer_tokens,
    length(completions.sampled) / 4 - coalesce({given}, 0) as sampled_tokens,
    length(completions.logprobs) / 4 as logprobs,
    coalesce(length(completions.experts), 0) as experts_bytes,
    completions.started_at, completions.finished_at, completions.finished_at - completions.started_at as seconds,
    completions.queued_seconds
from completions
join attempts on attempts.id = completions.attempt_id
left join rollouts on rollouts.id = attempts.rollout_id
left join groups on groups.id = rollouts.group_id
left join tasks on tasks.id = groups.task_id
left join runs on runs.id = attempts.run_id
""",
    "v_steps": """
select runs.name as run, policy_versions.step, 'v' || policy_versions.id as version,
    policy_versions.created_at as published_at, policy_versions.pushed_at, policy_versions.retired_at,
    (select count(*) from groups where groups.run_id = runs.id and groups.step = policy_versions.step
        and policy_versions.retired_at is null) as groups,
    (select count(*) from rollouts join groups on groups.id = rollouts.group_id where groups.run_id = runs.id
        and groups.step = policy_versions.step and policy_versions.retired_at is null) as rollouts,
    (select avg(rollouts.reward) from rollouts join groups on groups.id = rollouts.group_id where
        groups.run_id = runs.id and groups.step = policy_versions.step and policy_versions.retired_at is null)
        as reward_mean,
    policy_versions.checkpoint, policy_versions.hf_dir
from policy_versions
join runs on runs.id = policy_versions.run_id
""",
}


def drop_views(connection: Connection) -> None:
    """Drop the views, those of an earlier blackforge too."""
    for name in VIEWS:
        connection.execute(text(f"drop view if exists {name}"))


def make_views(connection: Connection) -> None:
    """Make the views, in a database of the newest schema without them."""
    given = GIVEN_TOKENS[connection.dialect.name].format(given="completions.given")
    for name, query in VIEWS.items():
        connection.exec_driver_sql(f"create view {name} as {query.replace('{given}', given)}")
