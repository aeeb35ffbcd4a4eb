// Machines: replicas, proxies, harnesses, trainers with the phases of their steps as lanes, sandbox hosts.

import { h, svg, clear } from "../dom.js";
import { ask } from "../api.js";
import { ago, num, percent, seconds, time } from "../format.js";
import { STATES, badge, openGroups, section, table, toRun } from "../parts.js";
import { workers } from "./runs.js";

const PHASES = ["wait", "prepare", "train", "checkpoint", "report", "push"];
const WIDTH = 1000;
const LANE = 16;

export async function machines(box, { signal }) {
  const body = h("div");
  box.append(h("h1", {}, "Machines"), body);
  let drawn = 0;

  async function load() {
    const got = await ask("machines", {}, signal);
    drawn = Date.now();
    clear(
      body,
      section("Replicas", replicas(got.proxies)),
      section("Runs", runsOf(got.machines)),
      section("Trainer phases", phases(got.machines.phases)),
      section("Traffic", traffic(got.machines)),
      section("Proxies of this pool", proxies(got.machines.proxies)),
      section("Sandbox hosts", hosts(got.machines.hosts)),
    );
  }

  await load();
  return {
    changed: async () => {
      if (Date.now() - drawn > 4000) await load();
    },
  };
}

function replicas(asked) {
  if (!asked.length)
    return h(
      "p.none",
      {},
      "The pool does not name the addresses of its proxies. Start the dashboard with --proxy URL to see their engines' replicas.",
    );
  return asked.map((proxy) => [
    h("h3", {}, proxy.url, proxy.model ? h("span.quiet", {}, ` ${proxy.model}`) : null),
    proxy.trouble
      ? h("p.note", {}, proxy.trouble)
      : table(
          [
            "replica",
            "state",
            "version",
            "calls in flight",
            "queue",
            "failures",
            "prompt tokens",
            "of these cached",
            "accept length",
          ],
          proxy.replicas.map((each) =>
            h(
              "tr",
              {},
              h("td", {}, each.url),
              h(
                "td",
                {},
                badge(
                  each.state,
                  each.state === "closed" ? "good" : "bad",
                  "the circuit: closed serves, open does not",
                ),
              ),
              h("td", {}, each.version || "–"),
              h("td", {}, num(each.in_flight)),
              h("td", { title: "of these, calls that wait in the engine" }, known(each.queue)),
              h("td", {}, num(each.failures)),
              h("td", {}, num(each.prompt_tokens)),
              h("td", {}, each.prompt_tokens ? percent(each.cached_tokens / each.prompt_tokens) : "–"),
              h("td", { title: "tokens that one check of drafted tokens yields" }, known(each.accept_length)),
            ),
          ),
          { empty: "no replica", caption: "replicas" },
        ),
  ]);
}

// What only some engines tell.
function known(value) {
  return value === null || value === undefined ? h("span.none", {}, "not known") : num(value);
}

function runsOf({ runs }) {
  const some = runs.filter((run) => run.harness || run.trainer);
  return table(
    ["run", "state", "who works at it", "step", "running"],
    some.map((run) =>
      h(
        "tr",
        {},
        h("td", {}, h("a", { href: toRun(run.name), "data-row": true }, run.name)),
        h("td", {}, badge(run.state, STATES[run.state])),
        h("td", {}, workers(run)),
        h("td", {}, num(run.step)),
        h("td", {}, openGroups(run)),
      ),
    ),
    { empty: "nobody works at a run", caption: "runs" },
  );
}

function phases(known) {
  const names = Object.keys(known);
  if (!names.length) return h("p.none", {}, "no step is published");
  return names.slice(0, 4).map((name) => lanes(name, known[name]));
}

function lanes(name, steps) {
  const spans = steps.flatMap((step) => {
    let at = step.published_at - PHASES.slice(0, 5).reduce((sum, phase) => sum + (step.seconds[phase] || 0), 0);
    return PHASES.filter((phase) => step.seconds[phase] !== undefined).map((phase) => {
      const from = phase === "push" ? step.published_at : at;
      at += phase === "push" ? 0 : step.seconds[phase];
      return { phase, step: step.step, from, to: from + step.seconds[phase] };
    });
  });
  if (!spans.length) return null;
  const begin = Math.min(...spans.map((span) => span.from));
  const end = Math.max(...spans.map((span) => span.to), begin + 0.001);
  const x = (at) => ((at - begin) / (end - begin)) * WIDTH;
  const last = steps[steps.length - 1];
  return h(
    "figure.lanes",
    {},
    h(
      "figcaption",
      {},
      h("span.title", {}, h("a", { href: toRun(name) }, name)),
      ` steps ${steps[0].step} to ${last.step}, ${seconds(end - begin)} until ${time(end)}`,
      last.tokens_per_second === null ? "" : `; ${num(last.tokens_per_second)} trained tokens per second`,
      last.mtp_length === null ? "" : `; ${num(last.mtp_length)} tokens expected of a draft`,
      h("span.quiet", {}, "Places are made from the seconds of the phases and the time of publishing."),
    ),
    PHASES.filter((phase) => spans.some((span) => span.phase === phase)).map((phase) =>
      h(
        "div.lane",
        {},
        h("span", {}, phase),
        svg(
          "svg",
          { viewBox: `0 0 ${WIDTH} ${LANE}`, preserveAspectRatio: "none", role: "img", "aria-label": phase },
          spans
            .filter((span) => span.phase === phase)
            .map((span) =>
              svg(
                "rect",
                {
                  class: phase === "wait" ? "side" : phase === "push" ? "compaction" : "model",
                  x: x(span.from).toFixed(2),
                  width: Math.max(1, x(span.to) - x(span.from)).toFixed(2),
                  y: 1,
                  height: LANE - 2,
                },
                svg("title", {}, `step ${span.step}: ${phase} ${seconds(span.to - span.from)}`),
              ),
            ),
        ),
      ),
    ),
  );
}

function traffic({ traffic: rows, traffic_of: total }) {
  return [
    table(
      ["run", "calls", "from", "to", "calls per second", "tokens per second", "calls at a time"],
      rows.map((each) => {
        const took = Math.max(0.001, each.last_at - each.first_at);
        return h(
          "tr",
          {},
          h("td", {}, each.run),
          h("td", {}, num(each.calls)),
          h("td", {}, time(each.first_at)),
          h("td", {}, ago(each.last_at)),
          h("td", {}, num(each.calls / took)),
          h("td", {}, num(each.tokens / took)),
          h("td", {}, num(each.model_seconds / took)),
        );
      }),
      { empty: "no call is recorded", caption: "traffic" },
    ),
    total ? h("p.quiet", {}, `of the newest ${num(total)} calls of the pool`) : null,
  ];
}

function proxies(rows) {
  return table(
    ["proxy", "state", "host", "process", "last heartbeat", "tokenizer"],
    rows.map((each) =>
      h(
        "tr",
        {},
        h("td", {}, `#${each.id}`),
        h("td", {}, each.alive ? badge("serves", "good") : badge(each.ended_at === null ? "gone" : "ended", "quiet")),
        h("td", {}, each.host),
        h("td", {}, String(each.pid)),
        h("td", {}, each.ended_at === null ? `${seconds(each.silent_seconds)} ago` : ago(each.ended_at)),
        h("td", {}, each.tokenizer || "–"),
      ),
    ),
    { empty: "no proxy has served this pool", caption: "proxies" },
  );
}

function hosts(rows) {
  return rows.length
    ? table(
        ["host", "run", "in use", "starting", "being removed", "failures", "mean start", "as of"],
        rows.map((each) =>
          h(
            "tr",
            {},
            h("td", {}, each.host),
            h("td", {}, each.run),
            h("td", {}, num(each.live)),
            h("td", {}, num(each.starting)),
            h("td", {}, num(each.stopping)),
            h("td", {}, num(each.failures)),
            h("td", {}, seconds(each.start_seconds)),
            h("td", { title: each.file }, ago(each.written_at)),
          ),
        ),
        { caption: "sandbox hosts" },
      )
    : h(
        "p.none",
        {},
        "A harness writes them to metrics.prom in its run's directory. None is found beside this pool, or no harness works at a run.",
      );
}
