// What an attempt did, as events; each leads to its call.

import { h } from "./dom.js";
import { ask } from "./api.js";
import { here, remember } from "./address.js";
import { num, words } from "./format.js";
import { badge, inPool, placed } from "./parts.js";

const BAD = new Set([
  "tool_failed",
  "malformed_call",
  "unknown_tool",
  "retry_loop",
  "undo_loop",
  "repetition",
  "giving_up",
  "destructive_command",
  "grader_read",
  "runner_left",
  "test_edited",
]);

const USUALLY_OFF = new Set(["tool_called"]);

export async function eventsOf(box, attempt, call, select, signal) {
  const got = await ask(`attempts/${attempt}/events`, {}, signal);
  const counts = new Map();
  for (const event of got.events) counts.set(event.kind, (counts.get(event.kind) || 0) + 1);
  const off = hidden(counts);
  const list = h("ol.events");
  const kinds = [...counts].sort((a, b) => b[1] - a[1]);
  const buttons = kinds.map(([kind, count]) =>
    h(
      "button.chip",
      {
        type: "button",
        "aria-pressed": off.has(kind) ? "false" : "true",
        onclick: (event) => {
          if (off.has(kind)) off.delete(kind);
          else off.add(kind);
          event.currentTarget.setAttribute("aria-pressed", off.has(kind) ? "false" : "true");
          remember({ kinds: chosen(counts, off) });
          draw();
        },
      },
      `${words(kind)} ${num(count)}`,
    ),
  );
  const draw = () => {
    const shown = got.events.filter((event) => !off.has(event.kind));
    list.replaceChildren(
      ...shown.map((event) =>
        h(
          "li",
          { "aria-current": event.completion === call ? "true" : null },
          h(
            "a",
            {
              href: "#",
              "data-row": true,
              title: inPool(event.completion),
              onclick: (press) => {
                press.preventDefault();
                select(event.completion);
              },
            },
            placed(event.completion, got.ordinals[event.completion]),
          ),
          " ",
          badge(words(event.kind), BAD.has(event.kind) ? "bad" : "quiet"),
          " ",
          event.name ? h("b", {}, event.name) : null,
          event.quote ? h("pre.text", {}, event.quote) : null,
        ),
      ),
    );
    if (!shown.length)
      list.append(h("li.none", {}, got.events.length ? "none of the chosen kinds" : "no event was seen"));
  };
  draw();
  box.append(
    h("p.tools", {}, buttons),
    h(
      "p.quiet",
      {},
      `An event is an observation, not a verdict. ${num(got.calls)} calls were read.`,
      got.unknown
        ? ` Of ${num(got.unknown)} of them it is not known what their requests showed, so failures of tools may be missing.`
        : "",
      got.more ? " There is more than is listed." : "",
    ),
    list,
  );
}

// The kinds of event that the address does not choose. It names those that are shown, or "none".
function hidden(counts) {
  const named = here().params.get("kinds");
  if (named === null) return new Set(USUALLY_OFF);
  const shown = new Set(named.split(","));
  return new Set([...counts.keys()].filter((kind) => !shown.has(kind)));
}

function chosen(counts, off) {
  const kinds = [...counts.keys()];
  if (kinds.every((kind) => off.has(kind) === USUALLY_OFF.has(kind))) return "";
  return kinds.filter((kind) => !off.has(kind)).join(",") || "none";
}
