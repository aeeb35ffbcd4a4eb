// Behaviour of a run: figures and events over its steps, the monitor's states, and the newest rollouts added up.

import { h, clear, trouble } from "../dom.js";
import { ask, name as part } from "../api.js";
import { link, settle } from "../address.js";
import { chart } from "../chart.js";
import { expanded, figuresOf, notDrawn } from "../figures.js";
import { num, percent, seconds, words } from "../format.js";
import { badge, crumbs, section, table, toRun } from "../parts.js";
import { runChoice } from "../runname.js";

const CHARTS = [
  ["turns and calls", ["behaviour/turns", "behaviour/calls"]],
  ["failed and repeated calls", ["behaviour/failure_rate", "behaviour/repeat_rate"]],
  ["failures by tool", ["tool_failure_rate/"]],
  ["failures by domain", ["failure_rate_by_domain/"]],
  ["seconds of a rollout", ["behaviour/model_seconds", "behaviour/tool_seconds"]],
  ["characters per turn", ["behaviour/characters_per_turn"]],
  ["share of reasoning", ["behaviour/reasoning_share"]],
  ["turns to the first edit", ["behaviour/turns_to_first_edit"]],
  ["drift of the commands", ["behaviour/command_drift"]],
  ["cheated", ["behaviour/hacked"]],
];
const MOST_RULES = 40;

export async function behaviour(box, { parts, params, signal }) {
  const runs = (await ask("runs", {}, signal)).runs;
  const own = parts[0] || (runs.find((run) => run.step !== null) || runs[0])?.name;
  if (!own) {
    box.append(h("h1", {}, "Behaviour"), h("p.none", {}, "this pool has no run"));
    return {};
  }
  if (!parts[0]) settle(["behaviour", own]);
  const whole = await ask(`runs/${part(own)}`, {}, signal);
  const grid = h("div.charts");
  const added = h("div");
  const monitor = h("div");
  const choice = runChoice("another run", { chosen: (name) => (location.hash = link(["behaviour", name])) }, signal);
  box.append(
    crumbs(["Runs", "#/"], [own, toRun(own)], ["behaviour"]),
    h("h1", {}, `Behaviour of ${own}`),
    h("p.tools", {}, choice),
    section("The monitor", monitor),
    section("Newest rollouts", added),
    section("Over the steps", grid),
  );
  let charts = [];

  async function draw({ metrics: known, rules: now }) {
    const rows = [...CHARTS, ...eventCharts(known)]
      .map(([title, wanted]) => [title, ...expanded(wanted, known)])
      .filter(([, wanted]) => wanted.length);
    const quiet = new Set(now.filter((rule) => rule.level === "ok").map((rule) => `monitor/${rule.name}`));
    const rules = known
      .filter((each) => each.startsWith("monitor/"))
      .sort((a, b) => quiet.has(a) - quiet.has(b));
    const all = [...new Set(rows.flatMap(([, wanted]) => wanted))];
    const got = await figuresOf(own, all, {}, signal);
    for (const each of charts) each.end();
    charts = rows.map(([title, wanted, left]) =>
      chart({
        title,
        note: left
          ? [
              `${notDrawn(left)}; `,
              h("a", { href: toRun(own) }, "the run's page"),
              " draws any metric by name",
            ]
          : null,
        steps: got.steps,
        series: wanted.map((each) => ({ label: words(each.slice(each.indexOf("/") + 1)), values: got.values[each] })),
      }),
    );
    clear(
      grid,
      charts.length
        ? charts.map((each) => each.box)
        : h(
            "p.none.whole",
            {},
            "no step of this run has figures of behaviour; the newest rollouts above are added up from the search index",
          ),
    );
    const shown = rules.slice(0, MOST_RULES);
    const states = await figuresOf(own, shown, { points: 120 }, signal);
    const left = rules.length - shown.length;
    clear(
      monitor,
      rulesOf(states, shown, now),
      left
        ? h("p.quiet", {}, `${notDrawn(left, "rule")}; those that are not ok now come first`)
        : null,
    );
  }

  await draw(whole);
  await fill(added, own, signal);
  return {
    end: () => charts.forEach((each) => each.end()),
    changed: async (marks) => {
      if (marks.has("steps") || marks.has("retired")) await draw(await ask(`runs/${part(own)}`, {}, signal));
      if (marks.has("finished") || marks.has("groups")) await fill(added, own, signal);
    },
  };
}

function eventCharts(known) {
  const events = known.filter((each) => each.startsWith("events/") && each !== "events/tool_called");
  const charts = [];
  for (let at = 0; at < events.length; at += 4)
    charts.push([`events per rollout${events.length > 4 ? `, ${at / 4 + 1}` : ""}`, events.slice(at, at + 4)]);
  return charts;
}

async function fill(box, own, signal) {
  try {
    const { figures, index } = await ask(`runs/${part(own)}/behaviour`, {}, signal);
    clear(
      box,
      figures
        ? addedUp(figures, own, index)
        : h("p.none", {}, index.trouble || "the search index is being made; come back in a moment"),
    );
  } catch (error) {
    if (error.name !== "AbortError") clear(box, trouble(error));
  }
}

function addedUp(figures, own, index) {
  if (!figures.rollouts)
    return h(
      "p.none",
      {},
      index.progress && index.progress.whole
        ? "no rollout of this run has finished"
        : "none of this run is in the index yet",
    );
  const byName = (rows, head) =>
    table(
      [head, "rollouts", "reward", "with a failure", "calls", "tokens", "took"],
      rows.map((each) =>
        h(
          "tr",
          {},
          h("td", {}, each.name),
          h("td", {}, num(each.rollouts)),
          h("td", {}, num(each.reward)),
          h("td", {}, percent(each.failed / each.rollouts)),
          h("td", {}, num(each.calls)),
          h("td", {}, num(each.tokens)),
          h("td", {}, seconds(each.seconds)),
        ),
      ),
      { caption: head },
    );
  return [
    h(
      "p.quiet",
      {},
      `the newest ${num(figures.rollouts)} finished rollouts in the index; an event is an observation, not a verdict`,
    ),
    table(
      ["event", "rollouts with it", "times", "their reward", "reward of the others"],
      figures.events.map((each) =>
        h(
          "tr",
          {},
          h(
            "td",
            {},
            h("a", { href: link(["search"], { run: own, event: each.kind }), "data-row": true }, words(each.kind)),
          ),
          h("td", {}, `${num(each.rollouts)} (${percent(each.rollouts / figures.rollouts)})`),
          h("td", {}, num(each.count)),
          h("td", {}, num(each.reward)),
          h("td", {}, num(each.reward_without)),
        ),
      ),
      { empty: "no event was seen", caption: "events" },
    ),
    h("h3", {}, "By agent"),
    byName(figures.agents, "agent"),
    h("h3", {}, "By domain"),
    byName(figures.domains, "domain"),
    Object.keys(figures.failures).length
      ? h(
          "p",
          {},
          "failures: ",
          Object.entries(figures.failures).map(([kind, count]) => [
            h("a", { href: link(["search"], { run: own, failure: kind }) }, `${kind} ${num(count)}`),
            " ",
          ]),
        )
      : null,
  ];
}

function rulesOf(states, rules, now) {
  if (!rules.length)
    return now.length
      ? table(
          ["rule", "state"],
          now.map((rule) =>
            h(
              "tr",
              {},
              h("td", {}, rule.name),
              h("td", {}, levelOf(rule)),
            ),
          ),
        )
      : h("p.none", {}, "no step has states of rules");
  const advice = new Set(now.filter((rule) => rule.advice).map((rule) => rule.name));
  const rank = ([name, values]) => (advice.has(name) ? most(values) / 4 : most(values));
  const loud = rules
    .map((each) => [each.slice(each.indexOf("/") + 1), states.values[each]])
    .sort((a, b) => rank(b) - rank(a));
  return h(
    "figure.heat",
    {},
    h(
      "figcaption",
      {},
      h("span.title", {}, "rules over the steps"),
      " watch is lighter, alarm is darker; advice is grey",
    ),
    h(
      "div.wide",
      { tabindex: "0", role: "region", "aria-label": "states of the monitor's rules by step" },
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          loud.map(([name, values]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name, advice.has(name) ? " (advice)" : ""),
              values.map((value, at) =>
                h(`td${classOf(value, advice.has(name))}`, {
                  title: `step ${states.steps[at]}: ${wordOf(value, advice.has(name))}`,
                  vars: { "--share": "0" },
                }),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

function levelOf(rule) {
  if (rule.advice && rule.level === "alarm") return badge("advice", "quiet");
  return badge(rule.level, rule.level === "ok" ? "good" : rule.level === "alarm" ? "bad" : "watch");
}

function classOf(value, advice) {
  if (value !== 1 && value !== 2) return "";
  return `${advice ? ".advice" : ""}${value === 1 ? ".watch" : advice ? "" : ".alarm"}`;
}

function wordOf(value, advice) {
  return ["ok", "watch", advice ? "advice" : "alarm"][value] ?? "not known";
}

function most(values) {
  return Math.max(0, ...values.filter((value) => value !== null));
}
