// One attempt: lanes of time, the tree of its calls, and beside it the conversation, the tokens or the events.

import { h, clear, trouble } from "./dom.js";
import { ask } from "./api.js";
import { remember } from "./address.js";
import { num, seconds, time } from "./format.js";
import { badge, facts, inPool, more, openBadge, placed } from "./parts.js";
import { onkey } from "./keys.js";
import { lanesOf } from "./lanes.js";
import { conversationOf } from "./conversation.js";
import { tokensOf } from "./tokens.js";
import { eventsOf } from "./events.js";
import { logOf } from "./log.js";

const VIEWS = [
  ["messages", "messages"],
  ["tokens", "tokens"],
  ["events", "events"],
  ["log", "agent's output"],
];
const SHOWN_BY = {
  messages: (box, call, select, attempt, signal) => conversationOf(box, call, select, signal),
  tokens: (box, call, select, attempt, signal) => tokensOf(box, call, signal),
  events: (box, call, select, attempt, signal) => eventsOf(box, attempt.id, call, select, signal),
  log: (box, call, select, attempt, signal) => logOf(box, attempt.id, signal),
};

export async function attemptView(box, attempt, params, signal) {
  const head = h("div");
  const lanes = h("div");
  const tree = h("div.tree", { role: "tree", "aria-label": "calls", tabindex: "0" });
  const further = h("p");
  const tabs = h("div.tabs", { role: "tablist", "aria-label": "view" });
  const pane = h("div.pane", { tabindex: "-1" });
  box.append(
    head,
    lanes,
    h("div.beside", {}, h("div.left", {}, h("h2", {}, "Calls"), tree, further), h("div.right", {}, tabs, pane)),
  );
  let calls = [];
  let next = null;
  let selected = Number(params.get("call")) || null;
  let view = params.get("view") || "messages";
  let shown = null;
  drawHead(head, attempt);

  async function load(first = 0) {
    const page = await ask(`attempts/${attempt.id}/calls`, { first }, signal);
    calls = first === 0 ? page.calls : [...calls, ...page.calls];
    next = page.next;
    draw();
  }

  function draw() {
    const places = new Map(calls.map((call) => [call.id, call.ordinal]));
    clear(
      tree,
      calls.map((call) => line(call, places.get(call.follows), call.id === selected, select)),
    );
    clear(further, next === null ? null : more(`further calls, of ${num(attempt.calls_in_all)}`, () => load(next)));
    clear(lanes, lanesOf(attempt, calls, select, selected));
    if (!calls.length)
      clear(
        tree,
        h(
          "p.none",
          {},
          attempt.archive
            ? "its calls have left the pool for an archive; read them with proxy.pool.read"
            : "no call is recorded yet",
        ),
      );
  }

  async function select(id, focus = false) {
    // places among the tokens are those of the call that the address names
    remember(selected === null || selected === id ? { call: id } : { call: id, token: null, tokens: null });
    selected = id;
    for (const item of tree.children) {
      const own = Number(item.dataset.call) === id;
      item.setAttribute("aria-selected", own ? "true" : "false");
      if (own) keepInSight(tree, item);
    }
    for (const bar of lanes.querySelectorAll("[data-call]"))
      bar.classList.toggle("chosen", Number(bar.dataset.call) === id);
    await fill(focus);
  }

  async function fill(focus) {
    if (shown && shown.end) shown.end();
    shown = null;
    clear(
      tabs,
      VIEWS.map(([key, text]) =>
        h(
          "button",
          {
            type: "button",
            role: "tab",
            "aria-selected": key === view ? "true" : "false",
            onclick: () => {
              view = key;
              remember({ view: key === "messages" ? "" : key });
              fill(true);
            },
          },
          text,
        ),
      ),
    );
    if (selected === null) return;
    const own = selected;
    clear(pane, h("p.quiet", {}, "…"));
    try {
      const part = h("div");
      const made = await (SHOWN_BY[view] || SHOWN_BY.messages)(
        part,
        own,
        (id) => {
          view = view === "events" ? "messages" : view;
          return select(id, true);
        },
        attempt,
        signal,
      );
      if (own !== selected) return;
      shown = made;
      clear(pane, part);
      if (shown && shown.placed) shown.placed(pane);
      if (focus) pane.focus({ preventScroll: true });
    } catch (error) {
      if (error.name !== "AbortError") clear(pane, trouble(error));
    }
  }

  const step = (by) => () => {
    const at = calls.findIndex((call) => call.id === selected);
    const to = calls[Math.max(0, Math.min(calls.length - 1, at + by))];
    if (to) select(to.id);
  };
  const turn = (to) => () => {
    view = view === to ? "messages" : to;
    remember({ view: view === "messages" ? "" : view });
    fill(false);
  };
  onkey(
    [
      ["n", "next call", step(1)],
      ["p", "previous call", step(-1)],
      ["t", "messages or tokens", turn("tokens")],
      ["e", "messages or events", turn("events")],
      ["l", "messages or the agent's output", turn("log")],
    ],
    signal,
  );
  tree.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    step(by)();
  });

  await load();
  if (calls.length) await select(calls.some((call) => call.id === selected) ? selected : lastMain(calls));
  return {
    end: () => shown && shown.end && shown.end(),
    changed: async (marks) => {
      if (attempt.closed_at !== null) return;
      if (!["completions", "groups", "finished", "working"].some((mark) => marks.has(mark))) return;
      attempt = await ask(`attempts/${attempt.id}`, {}, signal);
      drawHead(head, attempt);
      const follow = calls.length && selected === lastMain(calls);
      await load();
      if (follow && calls.length) await select(lastMain(calls));
    },
  };
}

function keepInSight(box, item) {
  const top = item.offsetTop;
  if (top < box.scrollTop || top + item.offsetHeight > box.scrollTop + box.clientHeight)
    box.scrollTop = top - box.clientHeight / 3;
}

function lastMain(calls) {
  const main = calls.filter((call) => call.label === "main" || call.label === null);
  const some = main.length ? main : calls;
  return some.reduce((last, call) => (call.ordinal > last.ordinal ? call : last)).id;
}

function drawHead(head, attempt) {
  const times = Object.entries(attempt.timings)
    .map(([name, value]) => `${name} ${seconds(value)}`)
    .join(", ");
  clear(
    head,
    facts([
      ["attempt", `${attempt.number + 1} (#${attempt.id}), ${attempt.agent}`],
      ["opened", time(attempt.opened_at)],
      ["took", attempt.closed_at === null ? openBadge(attempt.cut_off, "open") : seconds(attempt.closed_at - attempt.opened_at)],
      ["phases", times || null, "as the harness measured them"],
      ["calls", num(attempt.calls_in_all)],
      ["sampled tokens", num(attempt.sampled_tokens)],
      attempt.exit_code === null ? null : ["exit code", String(attempt.exit_code)],
      attempt.spent ? ["used up", attempt.spent] : null,
      attempt.max_turns === null ? null : ["may make", `${num(attempt.max_turns)} calls`],
      attempt.max_tokens === null ? null : ["may sample", `${num(attempt.max_tokens)} tokens`],
      attempt.augmentation.length ? ["environment", attempt.augmentation.join(", ")] : null,
      attempt.failure ? ["failure", badge(attempt.failure, "bad", attempt.meaning)] : null,
      attempt.trouble ? ["last trouble", `${time(attempt.trouble_at)}: ${attempt.trouble}`] : null,
    ]),
    attempt.detail ? h("pre.text.cut", {}, attempt.detail) : null,
  );
}

// before: the place of the call that it follows
function line(call, before, own, select) {
  const kind = call.label || "unlabelled";
  const lost = Object.entries(call.left_out).map(([why, tokens]) => `${num(tokens)} left out (${why})`);
  const fate =
    call.trained === null
      ? call.untrainable
        ? `not trainable: ${call.untrainable}`
        : ""
      : [`${num(call.trained)} trained`, ...lost].join(", ") +
        ` in step ${call.step}${call.rolled_back ? ", rolled back" : ""}`;
  const title = [
    `call ${call.ordinal} (${inPool(call.id)})`,
    call.follows === null ? "begins a conversation" : `follows ${placed(call.follows, before)}`,
    `prompt ${num(call.prompt_tokens)} tokens, ${num(call.new_tokens)} of them new`,
    call.finish_reason,
    fate,
  ]
    .filter(Boolean)
    .join("; ");
  return h(
    `a.call.${kind}`,
    {
      role: "treeitem",
      tabindex: "-1",
      href: "#",
      "aria-selected": own ? "true" : "false",
      "aria-level": call.depth + 1,
      "data-call": call.id,
      title,
      vars: { "--depth": String(Math.min(call.depth, 12)) },
      onclick: (event) => {
        event.preventDefault();
        select(call.id, true);
      },
    },
    h("span.no", {}, String(call.ordinal)),
    h("span.kind", {}, kind),
    call.finish_reason === "stop" || call.finish_reason === "tool_calls" ? null : badge(call.finish_reason, "watch"),
    call.misfit ? badge("misfit", "watch", call.misfit) : null,
    call.untrainable ? badge("untrainable", "watch", call.untrainable) : null,
    h(
      "span.tools-of",
      {},
      call.tools.slice(0, 3).join(", ") + (call.tools.length > 3 ? ` +${call.tools.length - 3}` : ""),
    ),
    h("span.say", {}, call.words),
    h("span.size", { title: "prompt and answer tokens" }, `${num(call.prompt_tokens)}→${num(call.answer_tokens)}`),
  );
}
