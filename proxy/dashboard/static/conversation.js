// A conversation up to one call: results of tools, reasoning, text, tool calls. All of it is text.

import { h, clear } from "./dom.js";
import { here, link } from "./address.js";
import { ask } from "./api.js";
import { num, seconds } from "./format.js";
import { badge, inPool, more } from "./parts.js";

const FOLDED = 1200; // characters of a text that is folded
const MOST_FIRST = 160; // characters of a tool call's first line
const OPEN_CALL = 300; // characters of a tool call's arguments that are open at first
const OPEN_LINES = 12; // lines of such arguments; a text with more may scroll, so the keyboard reaches it

export async function conversationOf(box, completion, select, signal) {
  const list = h("ol.turns");
  const before = h("p");
  box.append(before, list);

  async function load(id) {
    const page = await ask(`completions/${id}/conversation`, {}, signal);
    const turns = page.turns.flatMap((turn) => turnOf(turn, turn.completion === completion, select, signal));
    if (page.before === null) turns.unshift(beginning(page.turns[0]));
    if (page.instruction !== null)
      turns.unshift(h("li.user", {}, h("h3", {}, "the task's instruction"), text(page.instruction, 0)));
    list.prepend(...turns);
    clear(before, page.before === null ? null : more("earlier turns", () => load(page.before)));
  }

  await load(completion);
  return {
    placed: (pane) => {
      const own = list.querySelector(".own");
      if (own) pane.scrollTop = own.offsetTop - 8;
    },
  };
}

// first: the turn that begins a conversation
function beginning(first) {
  const { parts, params } = here();
  const tokens = link(parts, { ...Object.fromEntries(params), call: first.completion, view: "tokens" });
  const shown = (first.results || []).length > 0;
  return h(
    "li.begins",
    {},
    h(
      "p.gap",
      {},
      shown
        ? "of the first request's own messages only the results below are kept; "
        : "the first request's own messages are not kept; ",
      h("a", { href: tokens }, "its tokens"),
      " have them",
    ),
  );
}

function turnOf(turn, own, select, signal) {
  const items = [];
  if (turn.results === null)
    items.push(
      h(
        "li.tool",
        {},
        h(
          "p.none",
          {},
          "what this request showed is not known: the row is older than its record, or the API has no messages",
        ),
      ),
    );
  for (const result of turn.results || []) items.push(resultOf(result));
  items.push(
    h(
      `li.model${own ? ".own" : ""}`,
      { id: `turn-${turn.completion}` },
      h(
        "h3",
        {},
        h(
          "a",
          {
            href: "#",
            title: inPool(turn.completion),
            onclick: (event) => {
              event.preventDefault();
              select(turn.completion);
            },
          },
          `call ${turn.ordinal}`,
        ),
        " ",
        turn.label && turn.label !== "main" ? [badge(turn.label, "quiet"), " "] : null,
        turn.finish_reason === "stop" || turn.finish_reason === "tool_calls"
          ? null
          : [badge(turn.finish_reason, "watch"), " "],
        turn.untrainable ? [badge("untrainable", "watch", turn.untrainable), " "] : null,
        h("span.quiet", {}, seconds(turn.finished_at - turn.started_at)),
      ),
      turn.reasoning.size
        ? h(
            "details.reasoning",
            {},
            h("summary", {}, `reasoning, ${num(turn.reasoning.size)} characters`),
            text(turn.reasoning.text, turn.reasoning.size - turn.reasoning.text.length, true),
          )
        : null,
      turn.content.size
        ? text(turn.content.text, turn.content.size - turn.content.text.length)
        : turn.calls.length
          ? null
          : h("p.none", {}, "it says nothing"),
      turn.calls.map((call) => callOf(call)),
      turn.calls_in_all > turn.calls.length
        ? h("p.quiet", {}, `${num(turn.calls_in_all - turn.calls.length)} further calls`)
        : null,
      wholeReply(turn, signal),
    ),
  );
  return items;
}

function wholeReply(turn, signal) {
  const cut = [turn.reasoning, turn.content, ...turn.calls.map((call) => call.arguments)].some(
    (each) => each.size > each.text.length,
  );
  if (!cut && turn.calls_in_all === turn.calls.length) return null;
  const whole = h("pre.text");
  let at = 0;
  const load = async () => {
    const page = await ask(`completions/${turn.completion}/reply`, { offset: at }, signal);
    whole.append(h("span", {}, page.text));
    at += page.text.length;
    if (at < page.total) whole.after(more(`${num(page.total - at)} further characters`, load));
  };
  return h(
    "details",
    {
      ontoggle: (event) => {
        if (event.target.open && at === 0) load();
      },
    },
    h("summary", {}, "the whole reply as JSON"),
    whole,
  );
}

function callOf(call) {
  const written = pretty(call.arguments.text);
  const [first] = written.trim().split("\n", 1);
  const whole = first.length === written.trim().length && first.length <= MOST_FIRST;
  return h(
    "details.use",
    { open: call.arguments.size <= OPEN_CALL && !scrolls(written) },
    h(
      "summary",
      {},
      h("b", {}, call.tool),
      call.fault ? [" ", badge(call.fault, "bad")] : null,
      " ",
      h("span.short", {}, `${first.slice(0, MOST_FIRST)}${whole ? "" : "…"} `),
      h("span.quiet", {}, `${num(call.arguments.size)} characters`),
    ),
    text(written, call.arguments.size - call.arguments.text.length, true, "code"),
  );
}

function resultOf(result) {
  const left = result.size - result.head.length - result.tail.length;
  const body = [
    pre(result.head),
    left > 0
      ? h("p.gap", {}, `${num(left)} characters in between are not kept; the tokens of the next prompt have them`)
      : null,
    result.tail ? pre(result.tail) : null,
  ];
  return h(
    `li.${result.spoken ? "user" : "tool"}`,
    {},
    h(
      "details",
      { open: result.size <= FOLDED },
      h(
        "summary",
        {},
        result.spoken ? "message" : "result",
        result.tool ? [" of ", h("b", {}, result.tool)] : null,
        " ",
        result.error ? badge("error", "bad") : null,
        h("span.quiet", {}, ` ${num(result.size)} characters`),
      ),
      body,
    ),
  );
}

// cut: how many further characters the text has
function text(value, cut, always = false, kind = "") {
  const body = pre(value, kind);
  const rest = cut > 0 ? h("p.gap", {}, `${num(cut)} further characters are not shown here`) : null;
  if (always || value.length <= FOLDED) return [body, rest];
  return h(
    "details",
    {},
    h(
      "summary",
      {},
      `${value.slice(0, 160).replace(/\s+/g, " ")}… `,
      h("span.quiet", {}, `${num(value.length + cut)} characters`),
    ),
    body,
    rest,
  );
}

function pre(value, kind = "") {
  const tabindex = value.length > FOLDED || scrolls(value) ? "0" : null;
  return h(`pre.text${kind ? `.${kind}` : ""}`, { tabindex }, value);
}

function scrolls(value) {
  return value.split("\n", OPEN_LINES + 1).length > OPEN_LINES;
}

function pretty(written) {
  try {
    const value = JSON.parse(written);
    if (value === null || typeof value !== "object" || Array.isArray(value)) return written;
    const entries = Object.entries(value);
    if (entries.length === 1 && typeof entries[0][1] === "string") return entries[0][1];
    return entries.map(([key, each]) => `${key}: ${typeof each === "string" ? each : JSON.stringify(each)}`).join("\n");
  } catch {
    return written;
  }
}
