// Line charts with uPlot. Cursors of one page move together; dragging chooses a range of steps.

import uPlot from "/uplot/uPlot.esm.js";
import { h, clear } from "./dom.js";
import { num } from "./format.js";

export const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const HEIGHT = 170;
const SPOKEN = 8; // curves that are read out

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// series: [{label, values, run?}] beside `steps`; marks: [{label, points: [[step, value]]}] are drawn as dots;
// note: what is said below the chart.
export function chart({ title, steps, series, marks = [], onrange = null, sync = "steps", hint = "", note = null }) {
  const box = h("figure.chart");
  const plotted = h("div.plot", { role: "group", "aria-label": summary(title, steps, series) });
  const spoken = h("span.spoken", { role: "status", "aria-live": "polite" });
  const legend = h("ul.legend");
  const readout = h("span.at", {}, "");
  box.append(h("figcaption", {}, h("span.title", { title: hint || null }, title), readout), plotted, legend, spoken);
  if (note) box.append(h("p.quiet.note-of", {}, note));
  const known = series.filter((each) => each.values.some((value) => value !== null));
  if (!steps.length || (!known.length && !marks.some((each) => each.points.length))) {
    clear(plotted, h("p.none", {}, steps.length ? "no step has a number of this name" : "no step is published yet"));
    return { box, end() {} };
  }
  const all = [...known, ...marks.map((each) => ({ ...each, dots: true, values: placed(steps, each.points) }))];
  const xs = marks.length ? axis(steps, marks) : steps;
  const data = [xs, ...all.map((each) => (each.dots ? placed(xs, each.points) : onto(xs, steps, each.values)))];
  const items = all.map((each, at) => {
    const value = h("b", {}, "");
    const paint = each.colour || COLOURS[at % COLOURS.length];
    legend.append(h("li", {}, h("i", { vars: { "--paint": `var(${paint})` } }), each.label, " ", value));
    return { value, paint };
  });
  let plot = null;
  plotted.tabIndex = 0;
  plotted.addEventListener("keydown", (event) => {
    const to = plot && moved(event.key, plot.cursor.idx, xs.length);
    if (to === null || to === undefined) return;
    event.preventDefault();
    plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: HEIGHT / 3 }, true, true);
    const values = all.map((each, number) => `${each.label} ${num(data[number + 1][to])}`);
    clear(spoken, `step ${xs[to]}: ${shortened(values).join(", ")}`);
  });
  const draw = () => {
    if (plot) plot.destroy();
    plot = new uPlot(options(all, items, plotted.clientWidth || 320, sync, readout, xs, data, onrange), data, plotted);
  };
  const seen = new ResizeObserver(() => {
    if (!plot) draw();
    else if (plotted.clientWidth && plot.width !== plotted.clientWidth)
      plot.setSize({ width: plotted.clientWidth, height: HEIGHT });
  });
  seen.observe(plotted);
  const repaint = () => plot && draw();
  document.addEventListener("theme", repaint);
  return {
    box,
    end() {
      seen.disconnect();
      document.removeEventListener("theme", repaint);
      if (plot) plot.destroy();
    },
  };
}

// The place that a key leads to; null: the key leads nowhere.
function moved(key, at, count) {
  const none = at === null || at === undefined;
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (key === "ArrowRight") return none ? 0 : Math.min(count - 1, at + 1);
  if (key === "ArrowLeft") return none ? count - 1 : Math.max(0, at - 1);
  return null;
}

function shortened(texts) {
  const left = texts.length - SPOKEN;
  return left > 0 ? [...texts.slice(0, SPOKEN), `and ${left} further curves`] : texts;
}

function options(all, items, width, sync, readout, xs, data, onrange) {
  const ink = colour("--faint");
  const grid = { stroke: colour("--grid"), width: 1 };
  const line = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    scales: { x: { time: false } },
    cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: !onrange }, points: { size: 6 } },
    axes: [
      { ...line, size: 24, values: (_, values) => values.map((value) => (Number.isInteger(value) ? value : "")) },
      { ...line, size: 52, values: (_, values) => values.map((value) => num(value)) },
    ],
    series: [
      {},
      ...all.map((each, at) => ({
        label: each.label,
        stroke: colour(items[at].paint),
        width: each.dots ? 0 : 1.5,
        dash: DASHES[each.dash || 0],
        spanGaps: true,
        points: {
          show: each.dots || xs.length < 40,
          size: each.dots ? 8 : 4,
          fill: each.dots ? colour(items[at].paint) : undefined,
        },
        paths: each.dots ? () => null : undefined,
      })),
    ],
    hooks: {
      setCursor: [
        (plot) => {
          const at = plot.cursor.idx;
          readout.textContent = at === null || at === undefined ? "" : `step ${xs[at]}`;
          items.forEach((item, number) => {
            item.value.textContent = at === null || at === undefined ? "" : num(data[number + 1][at]);
          });
        },
      ],
      setSelect: [
        (plot) => {
          if (!onrange || plot.select.width < 4) return;
          const from = plot.posToVal(plot.select.left, "x");
          const to = plot.posToVal(plot.select.left + plot.select.width, "x");
          onrange(Math.round(from), Math.round(to));
        },
      ],
    },
  };
}

function axis(steps, marks) {
  return [...new Set([...steps, ...marks.flatMap((each) => each.points.map(([step]) => step))])].sort((a, b) => a - b);
}

function placed(xs, points) {
  const known = new Map(points);
  return xs.map((x) => known.get(x) ?? null);
}

function onto(xs, steps, values) {
  if (xs === steps) return values;
  const known = new Map(steps.map((step, at) => [step, values[at]]));
  return xs.map((x) => known.get(x) ?? null);
}

function summary(title, steps, series) {
  const parts = series.map((each) => {
    const known = each.values.filter((value) => value !== null);
    return known.length
      ? `${each.label}: from ${num(known[0])} to ${num(known[known.length - 1])}`
      : `${each.label}: none`;
  });
  return `${title}, steps ${steps[0] ?? 0} to ${steps[steps.length - 1] ?? 0}. ${shortened(parts).join("; ")}`;
}

// A small curve for tables: [[x, value | null]] -> element
export function spark(points, { width = 120, height = 28 } = {}) {
  const known = points.filter(([, value]) => value !== null);
  if (known.length < 2) return h("span.none", {}, known.length ? num(known[0][1]) : "");
  const xs = known.map(([x]) => x);
  const ys = known.map(([, y]) => y);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const x = (value) => 2 + ((width - 4) * (value - left)) / (right - left || 1);
  const y = (value) => height - 2 - ((height - 4) * (value - low)) / (high - low || 1);
  const path = known.map(([a, b], at) => `${at ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const element = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [key, value] of [
    ["viewBox", `0 0 ${width} ${height}`],
    ["width", width],
    ["height", height],
    ["class", "spark"],
    ["role", "img"],
    ["aria-label", `from ${num(ys[0])} to ${num(ys[ys.length - 1])}`],
  ])
    element.setAttribute(key, value);
  line.setAttribute("d", path);
  element.append(line);
  return element;
}
