// A run: alarms, curves of its steps, other runs laid over it, its queue, its account, its groups.

import { h, clear, trouble } from "../dom.js";
import { ask, name as part } from "../api.js";
import { link, remember } from "../address.js";
import { ago, num, percent, time } from "../format.js";
import { STATES, badge, crumbs, facts, fromTheTop, more, openGroups, row, section, table, toRun } from "../parts.js";
import { curvesOf } from "../curves.js";
import { accountOf } from "../account.js";
import { evaluationsOf } from "../evaluations.js";
import { groupLine, GROUP_HEADS } from "../grouplist.js";
import { queueOf } from "../queue.js";
import { workers } from "./runs.js";

export async function run(box, { parts, params, signal }) {
  const [name] = parts;
  if (!name) throw new Error("an address of a run names it: #/run/NAME");
  const whole = await ask(`runs/${part(name)}`, {}, signal);
  const head = h("div");
  const curves = h("div");
  const evaluations = h("div");
  const queue = h("div");
  const account = h("div");
  const groups = h("div");
  box.append(
    head,
    section("Curves", curves),
    evaluations,
    section("Queue", queue),
    section("Account", account),
    section("Groups", groups),
  );
  drawHead(head, whole);
  const shown = await curvesOf(curves, whole, params, signal);
  const [evaluated] = await Promise.all([
    evaluationsOf(evaluations, name, signal),
    each(queue, () => queueOf(queue, name, whole, signal)),
    each(account, () => accountOf(account, name, signal)),
    each(groups, () => groupsOf(groups, name, params, signal)),
  ]);
  let fresh = Date.now();
  return {
    end: shown.end,
    changed: async (marks) => {
      const steps = ["steps", "retired", "pushed"].some((mark) => marks.has(mark));
      const moved = steps || ["groups", "finished", "interventions", "working"].some((mark) => marks.has(mark));
      if (!moved && !(marks.has("completions") && Date.now() - fresh > 10000)) return;
      fresh = Date.now();
      const now = await ask(`runs/${part(name)}`, {}, signal);
      drawHead(head, now);
      if (steps) await shown.again(now);
      if (marks.has("finished") || marks.has("retired")) evaluated();
      await each(queue, () => queueOf(queue, name, now, signal));
      if (moved) await each(account, () => accountOf(account, name, signal));
    },
  };
}

async function each(box, work) {
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") clear(box, trouble(error));
  }
}

function drawHead(head, whole) {
  const { run, rules, interventions } = whole;
  const alarms = rules.filter((rule) => rule.level === "alarm" && !rule.advice);
  const watched = rules.filter((rule) => rule.level === "watch" && !rule.advice);
  const advice = rules.filter((rule) => rule.level === "alarm" && rule.advice);
  clear(
    head,
    crumbs(["Runs", "#/"], [run.name]),
    h("h1", {}, run.name),
    h(
      "p",
      {},
      badge(run.state, STATES[run.state]),
      " ",
      badge(run.purpose, "quiet"),
      run.paused ? [" ", badge(`paused by ${run.paused}`, "bad", "`trainer continue` ends a pause")] : null,
    ),
    alarms.length + watched.length
      ? h(
          "ul.alarms",
          { "aria-label": "rules" },
          alarms.map((rule) => ruleLine(rule, badge("alarm", "bad"))),
          watched.map((rule) => ruleLine(rule, badge("watch", "watch"))),
        )
      : null,
    advice.length
      ? h(
          "ul.advice",
          { "aria-label": "advice" },
          advice.map((rule) => ruleLine(rule, badge("advice", "quiet", "the monitor advises; this is no alarm"))),
        )
      : null,
    facts([
      [
        "step",
        run.step === null ? null : `${run.step} (${run.version})`,
        run.published_at === null ? null : `published ${time(run.published_at)}`,
      ],
      ["published", run.published_at === null ? null : ago(run.published_at)],
      [
        "reward now",
        num(run.reward.mean),
        `mean of ${run.reward.rewards} rewards among the ${run.reward.rollouts} rollouts of the newest ${run.reward.groups} finished groups`,
      ],
      ["of these with a reward", run.reward.rollouts ? percent(run.reward.rewards / run.reward.rollouts) : null],
      ["groups", num(run.groups)],
      ["running", openGroups(run)],
      ["last group ended", ago(run.finished_at)],
      ["opened", time(run.created_at)],
      ["who works at it", workers(run)],
    ]),
    interventions.length
      ? h(
          "details",
          {},
          h("summary", {}, `${interventions.length} interventions`),
          h(
            "ul",
            {},
            interventions
              .slice()
              .reverse()
              .map((done) =>
                h(
                  "li",
                  {},
                  `${time(done.at)} ${done.action.replaceAll("_", " ")}`,
                  done.task ? ` ${done.task}` : "",
                  ` by ${done.rule}: ${done.detail}`,
                ),
              ),
          ),
        )
      : null,
    h(
      "details",
      {},
      h("summary", {}, "configuration"),
      Object.keys(whole.config).length
        ? h("pre", {}, JSON.stringify(whole.config, null, 2))
        : h("p.none", {}, "no harness has stored one"),
    ),
  );
}

function ruleLine(rule, kind) {
  return h(
    "li",
    {},
    kind,
    ` ${rule.name} since step ${rule.since}`,
    rule.value === null ? "" : `, ${num(rule.value)}`,
  );
}

async function groupsOf(box, name, params, signal) {
  const list = h("div");
  const further = h("p");
  const state = h(
    "select",
    { "aria-label": "state", onchange: () => load() },
    ["", "RUNNING", "DONE", "LEASED", "CONSUMED", "TOMBSTONE"].map((each) =>
      h("option", { value: each, selected: params.get("state") === each }, each || "every state"),
    ),
  );
  const step = h("input", {
    type: "number",
    min: 0,
    placeholder: "step",
    "aria-label": "step",
    value: params.get("step") || "",
    onchange: () => load(),
  });
  const start = params.get("before");
  const given = { state: params.get("state"), step: params.get("step") };
  const top = h("div", {}, start === null ? null : fromTheTop(toRun(name, given), "all groups"));
  clear(box, h("p.tools", {}, state, " ", step), top, list, further);
  let rows = [];

  async function load(before = null) {
    const page = await ask(`runs/${part(name)}/groups`, { before, state: state.value, step: step.value }, signal);
    remember({ state: state.value, step: step.value, before });
    if (before === null) clear(top);
    rows = before === null ? page.groups : [...rows, ...page.groups];
    clear(
      list,
      table(GROUP_HEADS, rows.map(groupLine), {
        empty: page.before === null ? "no group is like that" : "none among the newest thousand; go on",
        caption: "groups",
      }),
    );
    clear(further, page.before === null ? null : more("older groups", () => load(page.before)));
  }

  await load(start);
}
