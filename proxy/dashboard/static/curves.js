// Curves over the steps of a run, and of others laid over it.

import { h, clear, trouble } from "./dom.js";
import { ask, name as part } from "./api.js";
import { remember } from "./address.js";
import { chart } from "./chart.js";
import { expanded, figuresOf, notDrawn } from "./figures.js";
import { NOTHING, num } from "./format.js";
import { runChoice } from "./runname.js";

// title, metrics (a name that ends with / stands for its family), what it is
const CHARTS = [
  ["reward", ["reward_mean"], "mean reward of the rollouts of a step; dots are evaluations"],
  ["reward by domain", ["reward_by_domain/"], "by the tasks' domain; dots are evaluations"],
  ["reward by agent", ["reward_by_agent/"], "mean reward of the groups of each agent; dots are evaluations"],
  [
    "length",
    ["positive_length_mean", "negative_length_mean", "positive_length_p99", "negative_length_p99"],
    "trainable tokens of rollouts above and below the mean of their group",
  ],
  ["entropy", ["entropy"], "mean of -logp of the sampled tokens"],
  ["KL", ["kl_rollout", "kl_fresh"], "KL(rollout || policy) per token, of all tokens and of fresh ones"],
  ["ratio", ["ratio_mean", "ratio_max"], "the ratios that the loss weighs"],
  [
    "clipped",
    ["clip_fraction", "mask_fraction"],
    "share of trained tokens whose weight is not their ratio; whose weight is 0",
  ],
  ["gradient norm", ["grad_norm"], "before clipping"],
  ["loss", ["loss", "imitation_loss"], "per token"],
  [
    "staleness of tokens",
    ["staleness_tokens_mean", "staleness_groups_max"],
    "published steps between the weights that sampled and those that are updated",
  ],
  ["seconds of a step", ["seconds/"], "wait for rollouts, prepare, train, checkpoint, report, push"],
  [
    "pauses",
    ["pause_seconds", "engine_wait_seconds"],
    "how long a push kept the engines from sampling; waited for engines",
  ],
  [
    "tree speed-up",
    ["speedup_tokens", "speedup_flops", "speedup_calls_flops"],
    "what would be computed without prefix trees over what is",
  ],
  ["tokens per second", ["tokens_per_second"], "distinct tokens over the seconds of training"],
  ["groups", ["groups", "equal_groups", "dropped_groups"], "taken; with equal rewards; that taught nothing"],
  ["left out", ["left_out_tokens/"], "tokens since the step before, by reason"],
];
// the charts that show evaluations, by what these are apart
const EVALUATED = { reward: "all", "reward by domain": "domain", "reward by agent": "agent" };
const STALENESS = "staleness_tokens";
// metrics that count values: title, what is counted
const HISTOGRAMS = {
  staleness_tokens: ["staleness", "steps between the weights that sampled a trained token and those it updates"],
  staleness_groups: ["staleness of groups", "the same steps, of whole groups: a group is as old as its oldest token"],
};
const ROWS = 12; // values of a histogram, the smallest ones; the others are added up in one more row
const COLUMNS = 80;

export async function curvesOf(box, whole, params, signal) {
  let charts = [];
  let known = whole.metrics;
  const own = whole.run.name;
  let extra = params.getAll("metrics");
  let others = params.getAll("with");
  let range = ["first", "last"].map((key) => (/^\d+$/.test(params.get(key) ?? "") ? Number(params.get(key)) : null));
  const tools = h("p.tools");
  const grid = h("div.charts");
  const heat = h("div");
  const note = h("p.quiet", { role: "status" });
  box.append(tools, note, grid, heat);

  const metric = h("input", {
    list: "metric-names",
    placeholder: "any metric by name",
    "aria-label": "add a metric",
    size: 28,
    onchange: () => {
      if (metric.value.trim()) add(metric.value.trim());
      metric.value = "";
    },
  });
  const names = h("datalist", { id: "metric-names" });
  const over = runChoice("lay a run over it", { stepped: true, chosen: lay }, signal);
  const all = h(
    "button",
    {
      type: "button",
      onclick: () => {
        range = [null, null];
        draw();
      },
    },
    "all steps",
  );
  const bound = (text, which) =>
    h("input", {
      type: "number",
      min: 0,
      placeholder: text,
      "aria-label": text,
      onchange: () => {
        range[which] = bounds[which].value === "" ? null : Number(bounds[which].value);
        if (range[0] !== null && range[1] !== null && range[0] > range[1]) range.reverse();
        draw();
      },
    });
  const bounds = [bound("first step", 0), bound("last step", 1)];
  const laid = h("span");
  tools.append(metric, names, " ", ...over, " ", laid, " ", ...bounds, " ", all);
  tools.append(h("span.quiet", {}, " or drag in a chart to choose steps"));

  function add(each) {
    extra = [...new Set([...extra, each])];
    draw();
  }

  function lay(each) {
    if (each !== own) others = [...new Set([...others, each])].slice(0, 3);
    draw();
  }

  async function draw() {
    bounds.forEach((field, which) => (field.value = range[which] ?? ""));
    remember({ metrics: extra, with: others, first: range[0], last: range[1] });
    clear(
      names,
      known.map((each) => h("option", { value: each })),
    );
    clear(
      laid,
      others.map((each) =>
        h(
          "button.chip",
          {
            type: "button",
            title: "take it away",
            onclick: () => {
              others = others.filter((one) => one !== each);
              draw();
            },
          },
          each,
          " ×",
        ),
      ),
    );
    const rows = [
      ...CHARTS.map(([title, wanted, hint]) => [title, ...expanded(wanted, known), hint]),
      ...extra.map((each) => [each, ...asked(each, known), "", true]),
    ];
    const wanted = [...new Set([...rows.flatMap(([, each]) => each), STALENESS])];
    const given = { first: range[0], last: range[1] };
    const runs = [own, ...others];
    try {
      const [got, beside] = await Promise.all([
        Promise.all(runs.map((each) => figuresOf(each, wanted, given, signal))),
        Promise.all(runs.map((each) => ask(`runs/${part(each)}/rewards`, {}, signal))),
      ]);
      for (const each of charts) each.end();
      const focused = grid.querySelector("figure.chart:has(.plot:focus) .title")?.textContent;
      charts = [];
      clear(grid);
      const first = got[0];
      const older = beside.some((each) => each.older) ? "; older evaluations are not drawn" : "";
      note.textContent = words(first, runs) + older;
      const within = ([step]) => (range[0] === null || step >= range[0]) && (range[1] === null || step <= range[1]);
      const dots = (what) =>
        beside.flatMap((each, number) =>
          Object.entries(each.evaluations[what] || {}).map(([label, points]) => ({
            label: runs.length > 1 ? `${label} · ${runs[number]}` : label,
            points: points.map((point) => [point.step, point.reward]).filter(within),
          })),
        );
      for (const [title, metrics, left, hint, mine] of rows) {
        const marks = dots(EVALUATED[title]);
        if (!metrics.length && !marks.length && !mine) continue;
        const counted = histogramOf(first, title, runs);
        const drawn = counted
          ? { box: counted, end() {} }
          : chart({
              title,
              hint,
              steps: merged(got),
              series: seriesOf(metrics, got, runs),
              marks,
              note: left ? `${notDrawn(left)}; any metric by name adds one` : null,
              onrange: (from, to) => {
                range = [from, to];
                draw();
              },
            });
        if (mine)
          drawn.box.querySelector("figcaption").append(
            h(
              "button.plain",
              {
                type: "button",
                "aria-label": `remove ${title}`,
                onclick: () => {
                  extra = extra.filter((one) => one !== title);
                  draw();
                },
              },
              "×",
            ),
          );
        charts.push(drawn);
        grid.append(drawn.box);
      }
      clear(heat, histogramOf(first, STALENESS, runs));
      charts.find(({ box }) => box.querySelector(".title").textContent === focused)?.box.querySelector(".plot")?.focus();
    } catch (error) {
      if (error.name !== "AbortError") clear(note, trouble(error));
    }
  }

  await draw();
  return {
    again: async (now) => {
      known = now.metrics;
      await draw();
    },
    end: () => charts.forEach((each) => each.end()),
  };
}

// The metrics of a name that somebody typed: it may be a family, or in steps that were not looked at for names.
function asked(name, known) {
  const family = name.endsWith("/") ? name : `${name}/`;
  return !known.includes(name) && known.some((each) => each.startsWith(family))
    ? expanded([family], known)
    : [[name], 0];
}

function merged(got) {
  return [...new Set(got.flatMap((each) => each.steps))].sort((a, b) => a - b);
}

function seriesOf(metrics, got, runs) {
  const steps = merged(got);
  return got.flatMap((each, number) => {
    const at = new Map(each.steps.map((step, place) => [step, place]));
    return metrics.map((metric) => ({
      label: runs.length > 1 ? `${label(metric)} · ${runs[number]}` : label(metric),
      dash: number,
      values: steps.map((step) => (at.has(step) ? (each.values[metric]?.[at.get(step)] ?? null) : null)),
    }));
  });
}

function label(metric) {
  return metric.includes("/") ? metric.slice(metric.indexOf("/") + 1) : metric;
}

function words(first, runs) {
  if (!first.steps.length)
    return first.last ? `none of the steps ${first.first} to ${first.last} is chosen` : "no step is published yet";
  const shown = `steps ${first.steps[0]} to ${first.steps[first.steps.length - 1]} of ${first.first} to ${first.last}`;
  const left = first.left_out
    ? `; ${num(first.left_out)} in between are not drawn, choose fewer steps to see them`
    : "";
  return runs.length > 1 ? `${shown}${left}; ${runs.join(", ")} by step` : `${shown}${left}`;
}

// A histogram over the steps, as shades; null where no step of the page's own run has it.
function histogramOf(curves, name, runs) {
  const histograms = curves.histograms[name] || [];
  const values = [...new Set(histograms.flatMap((each) => Object.keys(each).filter((key) => /^\d+$/.test(key))))]
    .map(Number)
    .sort((a, b) => a - b);
  if (!values.length) return null;
  const every = Math.max(1, Math.ceil(histograms.length / COLUMNS));
  const columns = histograms.map((each, at) => [curves.steps[at], each]).filter((_, at) => at % every === 0);
  const lines = values.slice(0, ROWS).map((value) => [String(value), [value]]);
  if (values.length > ROWS) lines.push([`${values[ROWS]} and more`, values.slice(ROWS)]);
  const rows = lines.reverse().map(([text, counted]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, text),
      columns.map(([step, each]) => {
        const total = Object.values(each).reduce((sum, count) => sum + count, 0);
        const share = total ? counted.reduce((sum, value) => sum + (each[value] || 0), 0) / total : 0;
        return h("td", {
          title: `step ${step}: ${share ? `${(100 * share).toFixed(1)} %` : NOTHING} had ${text}`,
          vars: { "--share": share.toFixed(3) },
        });
      }),
    ),
  );
  const [title, hint] = HISTOGRAMS[name] || [name, "a histogram by step"];
  return h(
    "figure.heat",
    {},
    h(
      "figcaption",
      {},
      h("span.title", {}, title),
      ` ${hint}; darker is more`,
      runs.length > 1 ? `; of ${runs[0]}` : "",
      every > 1 ? `; one of ${every} drawn steps is shown` : "",
    ),
    h(
      "div.wide",
      { tabindex: "0", role: "region", "aria-label": `${title} by step` },
      h("table", {}, h("tbody", {}, rows)),
    ),
  );
}
