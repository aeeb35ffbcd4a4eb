// Pieces that several pages have.

import { h } from "./dom.js";
import { link } from "./address.js";
import { NOTHING, num, words } from "./format.js";

export function crumbs(...steps) {
  return h(
    "nav.crumbs",
    { "aria-label": "place" },
    steps.map(([text, href], at) => [
      at ? " / " : "",
      href ? h("a", { href }, text) : h("span", { "aria-current": "page" }, text),
    ]),
  );
}

export function facts(pairs) {
  return h(
    "dl.facts",
    {},
    pairs
      .filter(Boolean)
      .map(([name, value, title]) =>
        h(
          "div",
          { title },
          h("dt", {}, name),
          h("dd", {}, value === null || value === undefined || value === "" ? NOTHING : value),
        ),
      ),
  );
}

export function badge(text, kind = "", title = null) {
  return h(`span.badge${kind ? `.${kind}` : ""}`, { title }, text);
}

// A call is named by its place in its attempt, as the tree has it; the pool's id is for titles.
export function inPool(id) {
  return `#${id} in the pool`;
}

export function placed(id, ordinal) {
  return ordinal === null || ordinal === undefined ? inPool(id) : `call ${ordinal}`;
}

export const STATES = {
  working: "good",
  waiting: "watch",
  paused: "bad",
  "nobody works at it": "quiet",
  RUNNING: "run",
  DONE: "good",
  LEASED: "watch",
  CONSUMED: "quiet",
  TOMBSTONE: "bad",
};

const CUT_OFF = "no outcome, and no harness works at the run; one that goes on with it starts the rollouts again";

// What is open in the pool runs only as long as a harness works at its run.
export function openBadge(cutOff, text = "running") {
  return cutOff ? badge("cut off", "quiet", CUT_OFF) : badge(text, "run");
}

export function groupBadge(state, cutOff) {
  return cutOff ? openBadge(true) : badge(state, STATES[state]);
}

export function openGroups(run) {
  return run.cut_off ? h("span.quiet", { title: CUT_OFF }, `${num(run.cut_off)} cut off`) : num(run.running);
}

// The reward as it is: missing is missing.
export function reward(value, title = null) {
  if (value === null || value === undefined) return h("span.reward.none", { title: title || "no reward" }, "none");
  const kind = value > 0.5 ? "high" : value > 0 ? "some" : "low";
  return h(`span.reward.${kind}`, { title }, num(value));
}

export function rewards(values) {
  return h(
    "span.dots",
    {
      role: "img",
      "aria-label": `rewards: ${values.map((value) => (value === null ? "none" : num(value))).join(", ")}`,
    },
    values
      .slice(0, 32)
      .map((value) =>
        h(`i.${value === null ? "none" : value > 0.5 ? "high" : value > 0 ? "some" : "low"}`, {
          title: value === null ? "no reward" : num(value),
        }),
      ),
    values.length > 32 ? ` +${values.length - 32}` : "",
  );
}

export function section(title, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

export function table(heads, rows, { empty = "nothing yet", caption = null } = {}) {
  if (!rows.length) return h("p.none", {}, empty);
  return h(
    "div.wide",
    { tabindex: "0", role: "region", "aria-label": caption || heads.join(", ") },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head) => h("th", { scope: "col" }, head)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

export function row(href, ...cells) {
  return h(
    "tr",
    {},
    cells.map((cell, at) => h("td", {}, at === 0 && href ? h("a", { href, "data-row": true }, cell) : cell)),
  );
}

export function more(text, work) {
  const button = h(
    "button",
    {
      type: "button",
      onclick: async () => {
        button.disabled = true;
        try {
          await work();
          button.remove();
        } catch (error) {
          button.disabled = false;
          button.after(h("p.trouble", { role: "alert" }, error.message));
        }
      },
    },
    text,
  );
  return button;
}

// Above a list that begins further on, because its address says so.
export function fromTheTop(href, text) {
  return h("p.quiet", {}, "the list begins further on; ", h("a", { href }, text));
}

export function shares(counts, total, title = "") {
  const known = Object.entries(counts).filter(([, value]) => value);
  if (!known.length) return h("span.none", {}, NOTHING);
  return h("span", { title }, known.map(([name, value]) => `${words(name)} ${num(value)}`).join(", "));
}

export function toRun(name, params = {}) {
  return link(["run", name], params);
}
