// A group: its members side by side.

import { h } from "../dom.js";
import { ask } from "../api.js";
import { link } from "../address.js";
import { ago, num, percent, seconds, time, words } from "../format.js";
import { badge, crumbs, facts, groupBadge, openBadge, reward, section, toRun } from "../parts.js";

export async function group(box, { parts, signal }) {
  const got = await ask(`groups/${Number(parts[0]) || 0}`, {}, signal);
  draw(box, got);
  return {
    changed: async (marks) => {
      if (got.group.state === "CONSUMED" || got.group.state === "TOMBSTONE") return;
      if (!["finished", "groups", "steps", "completions", "working"].some((mark) => marks.has(mark))) return;
      const now = await ask(`groups/${got.group.id}`, {}, signal);
      const at = window.scrollY;
      box.replaceChildren();
      draw(box, now);
      window.scrollTo(0, at);
    },
  };
}

function draw(box, { group, members, instruction, replaces, max_tokens: limit }) {
  const known = members.filter((each) => each.reward !== null);
  const mean = known.length ? known.reduce((sum, each) => sum + each.reward, 0) / known.length : null;
  const parts = [...new Set(members.flatMap((each) => Object.keys(each.reward_parts)))];
  box.append(
    crumbs(["Runs", "#/"], [group.run, toRun(group.run)], [`group ${group.queue_index}`]),
    h("h1", {}, `Group ${group.queue_index}`),
    h(
      "p",
      {},
      groupBadge(group.state, group.cut_off),
      " ",
      badge(group.domain, "quiet"),
      group.held_out ? [" ", badge("held out", "quiet")] : null,
      group.reason ? [" ", h("span", {}, `${words(group.reason)}${group.detail ? `: ${group.detail}` : ""}`)] : null,
    ),
    facts([
      ["task", group.task],
      ["agent", group.agent],
      ["mean reward", num(mean)],
      ["with a reward", `${known.length} of ${group.size}`],
      ["finished", `${group.finished} of ${group.members}`],
      [
        "step",
        group.step === null ? null : h("a", { href: toRun(group.run, { step: group.step }) }, String(group.step)),
      ],
      ["opened", time(group.created_at)],
      ["ended", ago(group.finished_at)],
      replaces === null ? null : ["replaces group", h("a", { href: link(["group", replaces]) }, `#${replaces}`)],
      limit === null ? null : ["tokens an attempt may sample", num(limit)],
      group.archive === null ? null : ["its calls have moved to", group.archive],
    ]),
    h(
      "details",
      { open: true },
      h("summary", {}, "instruction"),
      h("pre.text", {}, instruction || "the task has none"),
    ),
    section(
      "Members",
      members.length
        ? h(
            "div.members",
            {},
            members.map((each) => card(each, group.cut_off, mean, parts)),
          )
        : h("p.none", {}, "it has no rollouts: its task was dropped before its turn"),
    ),
  );
}

function card(each, cutOff, mean, parts) {
  const end = each.closed_at ?? (cutOff ? null : Date.now() / 1000);
  const took = each.opened_at === null || end === null ? null : end - each.opened_at;
  return h(
    "article.card",
    { "aria-label": `member ${each.member}` },
    h(
      "h3",
      {},
      h("a", { href: link(["rollout", each.rollout_id]), "data-row": true }, `member ${each.member}`),
      " ",
      reward(each.reward),
      each.reward !== null && mean !== null
        ? h(
            "span.quiet",
            { title: "against the mean of the group" },
            ` ${each.reward - mean >= 0 ? "+" : ""}${num(each.reward - mean)}`,
          )
        : null,
    ),
    h(
      "p",
      {},
      each.finished_at === null ? openBadge(cutOff) : null,
      each.failure ? [" ", badge(each.failure, "bad", each.detail)] : null,
      each.hacked ? [" ", badge(`hacked: ${each.hacked}`, "bad")] : null,
      each.left_out ? [" ", badge(each.left_out, "watch", "why its lease left it out")] : null,
    ),
    facts([
      ["took", seconds(took)],
      ["calls", num(each.completions)],
      ["sampled tokens", num(each.sampled_tokens)],
      [
        "trainable",
        each.trainable_tokens === null || !each.sampled_tokens
          ? null
          : percent(each.trainable_tokens / each.sampled_tokens),
      ],
      ["attempts", num(each.attempts)],
      each.weight === null ? null : ["weight", num(each.weight)],
      ["weights", each.versions.join(" ")],
      ...parts.map((part) => [part, num(each.reward_parts[part])]),
    ]),
    each.detail ? h("p.quiet.cut", {}, each.detail) : null,
  );
}
