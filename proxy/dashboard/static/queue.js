// The queue of a run: slots in the order of their turn, who waits for whom, and why groups were dropped.

import { h, clear } from "./dom.js";
import { ask, name as part } from "./api.js";
import { link } from "./address.js";
import { num, seconds, words } from "./format.js";
import { facts, table } from "./parts.js";

export async function queueOf(box, name, whole, signal) {
  const now = await ask(`runs/${part(name)}/queue`, {}, signal);
  const running = now.attended ? "running" : "cut off";
  const upTo = (count) => (count >= now.counted_to ? `${num(now.counted_to)} or more` : num(count));
  clear(
    box,
    now.waits ? h("p.waits", {}, now.waits, ".") : null,
    facts([
      [
        "open groups",
        `${num(now.open_groups)} of ${now.limit === null ? "no limit" : num(now.limit)}`,
        "running, waiting to be trained, or of a step whose weights are not pushed yet",
      ],
      [
        "a step takes",
        now.step_groups === null
          ? "not known"
          : `${num(now.step_groups)} of ${now.window === null ? "all that are done" : `the window's ${num(now.window)}`}`,
        now.step_groups === null
          ? "no trainer has said"
          : "the window begins at the oldest group that is running or done; framed slots are in it",
      ],
      [running, upTo(now.running)],
      ["done, waiting for the trainer", upTo(now.done)],
      ["leased to a step", upTo(now.leased)],
      [`held out, ${running}`, upTo(now.held_out_running)],
      ["tasks dropped by the monitor", num(now.dropped_tasks)],
    ]),
    now.slots.length
      ? h(
          "div.slots",
          { role: "list", "aria-label": "slots of the queue, oldest first" },
          now.slots.map((each) => slot(each, running)),
        )
      : h("p.none", {}, "no group is open"),
    now.more ? h("p.quiet", {}, "There are more open groups than are drawn; the oldest are.") : null,
    h(
      "p.legend-line",
      {},
      ["RUNNING", "DONE", "LEASED"].map((state) => [h(`i.slot.${state}`), ` ${wordOf(state, running)}  `]),
    ),
    h("h3", {}, "Dropped groups by reason"),
    table(
      ["reason", "groups", "meaning"],
      now.dropped.map((each) =>
        h("tr", {}, h("td", {}, words(each.reason)), h("td", {}, num(each.groups)), h("td", {}, each.meaning)),
      ),
      { empty: "no group was dropped", caption: "dropped groups" },
    ),
    now.dropped.length
      ? h("p.quiet", {}, `of the newest ${num(now.dropped_of)} dropped groups; the account below has all`)
      : null,
  );
}

function wordOf(state, running) {
  return state === "RUNNING" ? running : state.toLowerCase();
}

function slot(each, running) {
  const open = each.members - each.finished;
  const text = `group ${each.queue_index}, ${each.task}${each.agent ? ` (${each.agent})` : ""}: ${wordOf(each.state, running)}, ${each.finished} of ${each.members} rollouts finished, ${each.rewards} with a reward, opened ${seconds(each.age_seconds)} ago${each.step === null ? "" : `, step ${each.step}`}${each.in_window ? ", in the window" : ""}`;
  return h(
    "span",
    { role: "listitem" },
    h(
      `a.slot.${each.state}${each.in_window ? ".open" : ""}`,
      { href: link(["group", each.group_id]), title: text, "aria-label": text },
      h("i", { vars: { "--part": each.members ? (1 - open / each.members).toFixed(3) : "0" } }),
    ),
  );
}
