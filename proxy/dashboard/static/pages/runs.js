// All runs: alarms first, then what each earns, how far it is, and who works at it.

import { h, clear } from "../dom.js";
import { ask } from "../api.js";
import { link, remember } from "../address.js";
import { spark } from "../chart.js";
import { ago, num, time } from "../format.js";
import { STATES, badge, fromTheTop, more, openGroups, row, table, toRun } from "../parts.js";

const HEADS = [
  "run",
  "state",
  "step",
  "reward",
  "by step",
  "calls/s",
  "tokens/s",
  "groups",
  "running",
  "last group",
  "who works at it",
];

export async function runs(box, { params, signal }) {
  const alarms = h("div");
  const list = h("div");
  const further = h("p");
  const title = h("h1", {}, "Runs");
  const pool = h("p.quiet");
  const sessions = h("div");
  const start = params.get("before");
  box.append(title, pool, alarms, start === null ? "" : fromTheTop("#/", "all runs"), list, further, sessions);
  let shown = [];
  let busy = new Map();
  let loud = [];

  async function load() {
    const page = await ask("runs", { before: start }, signal);
    const older = shown.filter((each) => page.runs.length && each.id < page.runs[page.runs.length - 1].id);
    pool.textContent = page.pool;
    loud = page.alarms;
    draw([...page.runs, ...older], older.length ? null : page.before, page.traffic);
  }

  function draw(entries, before, traffic) {
    shown = entries;
    if (traffic) busy = new Map(traffic.map((each) => [each.run, each]));
    clear(alarms, alarmsOf(loud, entries));
    clear(
      list,
      table(
        HEADS,
        entries.map((run) => line(run, busy.get(run.name))),
        { empty: "this pool has no run", caption: "runs" },
      ),
    );
    if (before === undefined) return;
    clear(
      further,
      before === null
        ? null
        : more("older runs", async () => {
            const page = await ask("runs", { before }, signal);
            remember({ before });
            draw([...shown, ...page.runs], page.before, null);
          }),
    );
  }

  const first = params.get("sessions");
  await Promise.all([load(), sessionsOf(sessions, first, signal)]);
  return {
    changed: async (parts) => {
      const shownHere = ["groups", "finished", "steps", "pushed", "retired", "interventions", "working"];
      if (shownHere.some((part) => parts.has(part))) await load();
      if (parts.has("attempts") || (shown.length === 0 && parts.has("completions"))) await sessionsOf(sessions, first, signal);
    },
  };
}

// Agents that no run started: somebody pointed them at the proxy.
async function sessionsOf(box, start, signal) {
  const page = await ask("sessions", { before: start }, signal);
  let rows = page.sessions;
  const draw = (before) =>
    clear(
      box,
      rows.length === 0
        ? null
        : [
            h("h2", {}, "Sessions"),
            start === null ? null : fromTheTop("#/", "all sessions"),
            table(
              ["session", "agent", "calls", "last call", "opened"],
              rows.map((each) =>
                row(
                  link(["attempt", each.id]),
                  `#${each.id}`,
                  each.agent,
                  num(each.calls),
                  ago(each.last_at),
                  time(each.opened_at),
                ),
              ),
              { caption: "sessions" },
            ),
            before === null
              ? null
              : h(
                  "p",
                  {},
                  more("older sessions", async () => {
                    const next = await ask("sessions", { before }, signal);
                    remember({ sessions: before });
                    rows = [...rows, ...next.sessions];
                    draw(next.before);
                  }),
                ),
          ],
    );
  draw(page.before);
}

// First the runs that somebody works at, of which the list may show some further down, then the others of the list.
function alarmsOf(first, entries) {
  const named = new Set(first.map((run) => run.name));
  const others = entries.filter((run) => (run.alarms.length || run.paused) && !named.has(run.name));
  const loud = [...first, ...others];
  if (!loud.length) return null;
  return h(
    "ul.alarms",
    { "aria-label": "alarms" },
    loud.map((run) =>
      h(
        "li",
        {},
        badge("alarm", "bad"),
        " ",
        h("a", { href: toRun(run.name), "data-row": true }, run.name),
        " ",
        run.paused ? `is paused by ${run.paused}` : `has ${run.alarms.join(", ")} in alarm`,
      ),
    ),
  );
}

// Calls of the last minutes; older ones say nothing about now.
function rate(traffic, count) {
  if (!traffic || Date.now() / 1000 - traffic.last_at > 300) return "–";
  return num(traffic[count] / Math.max(1, Math.max(traffic.last_at, Date.now() / 1000) - traffic.first_at));
}

function line(run, traffic) {
  const { reward } = run;
  return row(
    toRun(run.name),
    run.name,
    [
      badge(run.state, STATES[run.state]),
      " ",
      run.purpose === "train" ? null : badge(run.purpose, "quiet"),
      run.alarms.map((name) => [" ", badge(name, "bad", "in alarm")]),
      run.watched.map((name) => [" ", badge(name, "watch", "one more step may alarm")]),
      run.advice.map((name) => [" ", badge(`advice: ${name}`, "quiet", "the monitor advises; this is no alarm")]),
    ],
    run.step === null
      ? null
      : h("span", { title: `${run.version}, published ${time(run.published_at)}` }, num(run.step)),
    h(
      "span",
      {
        title: `mean of ${reward.rewards} rewards among the ${reward.rollouts} rollouts of the newest ${reward.groups} finished groups`,
      },
      num(reward.mean),
    ),
    spark(run.curve),
    h("span", { title: "of the pool's newest 2000 calls, while there are some" }, rate(traffic, "calls")),
    rate(traffic, "tokens"),
    num(run.groups),
    openGroups(run),
    h("span", { title: time(run.finished_at) }, ago(run.finished_at)),
    workers(run),
  );
}

export function workers(run) {
  const parts = [];
  for (const [name, worker] of [
    ["harness", run.harness],
    ["trainer", run.trainer],
  ]) {
    if (!worker) continue;
    parts.push(
      h(
        "span",
        { title: `process ${worker.pid}, last heartbeat ${Math.round(worker.silent_seconds)} s ago` },
        `${name} on ${worker.host}`,
        worker.alive ? null : [" ", badge("gone", "bad")],
      ),
    );
  }
  return parts.length ? parts.flatMap((part, at) => (at ? [", ", part] : [part])) : h("span.quiet", {}, "nobody");
}
