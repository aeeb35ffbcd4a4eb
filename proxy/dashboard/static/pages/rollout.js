// A rollout: verdict and reward, its attempts, and of one of them the tree of calls beside the conversation.

import { h, clear } from "../dom.js";
import { ask } from "../api.js";
import { link, remember } from "../address.js";
import { ago, num, time, words } from "../format.js";
import { badge, crumbs, facts, groupBadge, inPool, openBadge, placed, reward, toRun } from "../parts.js";
import { onkey } from "../keys.js";
import { attemptView } from "../attemptview.js";

export async function rollout(box, { parts, params, signal }) {
  const id = Number(parts[0]) || 0;
  let got = await ask(`rollouts/${id}`, {}, signal);
  const head = h("div");
  const tries = h("div");
  const body = h("div");
  box.append(head, tries, body);
  drawHead(head, got);
  let shown = null;

  async function look(attempt) {
    if (shown && shown.end) shown.end();
    clear(tries, triesOf(got, attempt, look));
    clear(body);
    if (attempt === null) {
      body.append(h("p.none", {}, "it has no attempt yet"));
      shown = null;
      return;
    }
    remember({ attempt: attempt === got.shown ? "" : attempt });
    shown = await attemptView(body, await ask(`attempts/${attempt}`, {}, signal), params, signal);
  }

  await look(Number(params.get("attempt")) || got.shown);
  const at = got.members.indexOf(got.id);
  const to = (step) => () => {
    const next = got.members[at + step];
    if (next) location.hash = link(["rollout", next]);
  };
  onkey(
    [
      ["[", "previous member of the group", to(-1)],
      ["]", "next member of the group", to(1)],
      ["g", "its group", () => (location.hash = link(["group", got.group_id]))],
    ],
    signal,
  );
  return {
    end: () => shown && shown.end && shown.end(),
    changed: async (marks) => {
      if (got.finished_at === null && ["finished", "groups", "completions", "working"].some((mark) => marks.has(mark))) {
        got = await ask(`rollouts/${id}`, {}, signal);
        drawHead(head, got);
        if (!shown && got.shown !== null) await look(got.shown);
      }
      if (shown && shown.changed) await shown.changed(marks);
    },
  };
}

function drawHead(head, got) {
  clear(
    head,
    crumbs(
      ["Runs", "#/"],
      [got.run, toRun(got.run)],
      [`group ${got.queue_index}`, link(["group", got.group_id])],
      [`member ${got.member}`],
    ),
    h("h1", {}, `${got.task}, member ${got.member}`),
    h(
      "p.members-line",
      { role: "navigation", "aria-label": "members of the group" },
      got.members.map((each, at) =>
        h(
          "a",
          { href: link(["rollout", each]), "aria-current": each === got.id ? "true" : null, title: `member ${at}` },
          reward(got.group_rewards[at], `member ${at}`),
        ),
      ),
    ),
    h(
      "div.verdict",
      {},
      h(
        "div",
        {},
        h("span.big", {}, reward(got.reward)),
        got.finished_at === null ? openBadge(got.cut_off) : null,
        got.failure ? [" ", badge(got.failure, "bad", got.meaning)] : null,
        got.hacked ? [" ", badge(`hacked: ${got.hacked}`, "bad")] : null,
      ),
      got.failure ? h("p", {}, got.meaning) : null,
      got.detail ? h("pre.text.cut", {}, got.detail) : null,
      Object.keys(got.reward_parts).length
        ? h(
            "ul.bars",
            { "aria-label": "parts of the reward" },
            Object.entries(got.reward_parts).map(([name, value]) => bar(name, value)),
          )
        : null,
    ),
    facts([
      ["agent", got.agent],
      ["domain", got.domain],
      [
        "group",
        [
          groupBadge(got.group_state, got.cut_off),
          got.group_reason ? ` ${words(got.group_reason)}${got.group_detail ? `: ${got.group_detail}` : ""}` : "",
        ],
      ],
      ["step", num(got.step)],
      ["calls", num(got.completions)],
      ["sampled tokens", num(got.sampled_tokens)],
      ["trainable tokens", num(got.trainable_tokens)],
      ["weights", got.versions.join(" ")],
      ["ended", got.finished_at === null ? null : ago(got.finished_at), time(got.finished_at)],
      got.weight === null ? null : ["weight in the loss", num(got.weight)],
      got.left_out ? ["left out", got.left_out] : null,
      got.set_aside ? ["set aside", got.set_aside] : null,
    ]),
    integrity(got.integrity),
    got.replaced
      ? h(
          "details",
          {},
          h("summary", {}, "outcomes that a scorer replaced"),
          h("pre", {}, JSON.stringify(got.replaced, null, 2)),
        )
      : null,
    h(
      "details",
      {},
      h("summary", {}, "instruction"),
      h(
        "pre.text",
        {},
        got.instruction || "the task has none",
        got.instruction_size > got.instruction.length
          ? `\n… ${num(got.instruction_size - got.instruction.length)} further characters`
          : "",
      ),
    ),
  );
}

function bar(name, value) {
  const shown = typeof value === "number" ? Math.max(0, Math.min(1, Math.abs(value))) : 0;
  return h(
    "li",
    {},
    h("span", {}, name),
    h(`i.${value < 0 ? "low" : "high"}`, { vars: { "--part": shown.toFixed(3) } }),
    h("b", {}, num(value)),
  );
}

function integrity(found) {
  if (!found) return null;
  const findings = found.findings || [];
  return h(
    "details",
    { open: findings.length > 0 },
    h(
      "summary",
      {},
      findings.length
        ? `${findings.length} findings of detectors of reward hacking`
        : "detectors of reward hacking found nothing",
    ),
    h(
      "ul",
      {},
      findings.map((each) =>
        h(
          "li",
          {},
          badge(each.severity, each.severity === "strong" ? "bad" : "watch"),
          ` ${each.detector}`,
          each.completion
            ? h("span", { title: inPool(each.completion) }, ` at ${placed(each.completion, each.ordinal)}`)
            : "",
          ": ",
          h("q", {}, each.quote || ""),
        ),
      ),
    ),
    found.judge
      ? h(
          "p",
          {},
          `the judge: ${found.judge.hacked === true ? "hacked" : found.judge.hacked === false ? "not hacked" : "no opinion"}: ${found.judge.reason}`,
        )
      : null,
  );
}

function triesOf(got, present, look) {
  if (got.attempts.length < 2 && present === got.shown) return null;
  return h(
    "p.tools",
    { "aria-label": "attempts" },
    "attempts: ",
    got.attempts
      .slice()
      .reverse()
      .map((each) => [
        h(
          "button.chip",
          {
            type: "button",
            "aria-pressed": each.id === present ? "true" : "false",
            title: each.place ? `its tokens: ${each.place}` : null,
            onclick: () => {
              remember({ call: "", log: "", token: "", tokens: "" }); // places in the attempt that is left
              look(each.id);
            },
          },
          `${each.number + 1}${each.final ? " (outcome)" : ""}${each.failure ? `: ${each.failure}` : ""}`,
        ),
        " ",
      ]),
    got.attempts_in_all > got.attempts.length
      ? h("span.quiet", {}, `the newest ${got.attempts.length} of ${got.attempts_in_all}`)
      : null,
  );
}
