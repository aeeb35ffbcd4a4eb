// A line of a list of groups.

import { link } from "./address.js";
import { ago, num } from "./format.js";
import { badge, groupBadge, rewards, row } from "./parts.js";

export const GROUP_HEADS = ["group", "task", "state", "rewards", "mean", "step", "why", "ended"];

export function groupLine(group) {
  const known = group.rewards.filter((value) => value !== null);
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  const why = group.reason || group.failure || "";
  return row(
    link(["group", group.id]),
    `${group.queue_index}`,
    [group.task, group.agent ? ` (${group.agent})` : "", " ", badge(group.domain, "quiet")],
    [groupBadge(group.state, group.cut_off), group.held_out ? [" ", badge("held out", "quiet")] : null],
    rewards(group.rewards),
    num(mean),
    num(group.step),
    why ? `${why}${group.detail ? `: ${group.detail}` : ""}` : "",
    ago(group.finished_at),
  );
}
