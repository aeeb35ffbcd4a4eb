// Where the time of an attempt went: lanes for the queue, the model, the tools and lost calls, over the attempt's clock.
// A call waits for its place before it is sampled, so its time in the queue is drawn at its beginning.

import { h, svg } from "./dom.js";
import { num, seconds } from "./format.js";

const WIDTH = 1000;
const LANE = 18;
// seconds of waiting below which nothing is drawn
const LEAST = 0.001;

export function lanesOf(attempt, calls, select, selected) {
  if (!calls.length) return null;
  const begin = Math.min(attempt.opened_at, ...calls.map((call) => call.started_at));
  const end = Math.max(attempt.closed_at ?? 0, ...calls.map((call) => call.finished_at), begin + 0.001);
  const x = (at) => ((at - begin) / (end - begin)) * WIDTH;
  const ended = new Map(calls.map((call) => [call.id, call.finished_at]));
  const gaps = calls.filter((call) => ended.has(call.follows) && call.started_at > ended.get(call.follows));
  const lost = attempt.failed_calls || [];
  const sampled = (call) => call.started_at + (call.queued_seconds ?? 0);
  const model = calls.reduce((sum, call) => sum + call.finished_at - sampled(call), 0);
  const queue = calls.reduce((sum, call) => sum + (call.queued_seconds ?? 0), 0);
  const unknown = calls.filter((call) => call.queued_seconds === null).length;
  const tools = gaps.reduce((sum, call) => sum + call.started_at - ended.get(call.follows), 0);
  const lanes = [
    [
      "queue",
      calls
        .filter((call) => call.queued_seconds >= LEAST)
        .map((call) =>
          bar(
            call.started_at,
            sampled(call),
            "queue",
            `call ${call.ordinal} waited ${seconds(call.queued_seconds)} for a place and an engine`,
            call.id,
          ),
        ),
    ],
    [
      "model",
      calls.map((call) =>
        bar(
          sampled(call),
          call.finished_at,
          `model ${call.label === "main" || !call.label ? "" : call.label}`,
          `call ${call.ordinal}: ${seconds(call.finished_at - sampled(call))}, ${num(call.answer_tokens)} tokens`,
          call.id,
        ),
      ),
    ],
    [
      "tools",
      gaps.map((call) =>
        bar(
          ended.get(call.follows),
          call.started_at,
          "tool",
          `before call ${call.ordinal}: ${seconds(call.started_at - ended.get(call.follows))}`,
          call.follows,
        ),
      ),
    ],
  ];
  if (lost.length)
    lanes.push([
      "lost calls",
      lost.map(([from, to]) =>
        bar(from, to, "lost", `a call failed that was no fault of its client: ${seconds(to - from)}`),
      ),
    ]);

  function bar(from, to, kind, title, id) {
    const own = svg(
      "rect",
      {
        class: `${kind}${id !== undefined && id === selected && kind.startsWith("model") ? " chosen" : ""}`,
        x: x(from).toFixed(2),
        width: Math.max(1, x(to) - x(from)).toFixed(2),
        "data-call": kind.startsWith("model") ? id : null,
      },
      svg("title", {}, title),
    );
    if (id !== undefined) own.addEventListener("click", () => select(id));
    return own;
  }

  const rows = lanes.map(([name, bars]) =>
    h(
      "div.lane",
      {},
      h("span", {}, name),
      svg(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${LANE}`, preserveAspectRatio: "none", role: "img", "aria-label": name },
        bars.map((each) => {
          each.setAttribute("height", LANE - 2);
          each.setAttribute("y", 1);
          return each;
        }),
      ),
    ),
  );
  const setup = attempt.timings.setup;
  const first = Math.min(...calls.map((call) => call.started_at)) - attempt.opened_at;
  return h(
    "figure.lanes",
    {},
    h(
      "figcaption",
      {},
      h("span.title", {}, "time"),
      ` ${seconds(end - begin)} in all; queue ${seconds(queue)}, model ${seconds(model)}, tools ${seconds(tools)}`,
      first >= 0 ? `, before the first call ${seconds(first)}` : "",
      setup === undefined ? "" : ` (setup ${seconds(setup)})`,
      unknown
        ? h(
            "span.quiet",
            {},
            `How long ${unknown} of ${calls.length} calls waited is not recorded; it is part of the model's time`,
          )
        : null,
    ),
    rows,
  );
}
