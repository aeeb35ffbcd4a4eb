// The keyboard: what each key does, and the dialog that says so. Pages add keys of their own by `onkey`.

import { h, clear } from "./dom.js";

const ours = new Map();
let shown = [
  ["/", "search"],
  ["r", "all runs"],
  ["b", "behaviour"],
  ["m", "machines"],
  ["← →", "in a chart or among tokens that have the focus: the previous or next one; in a chart Home and End, too"],
  ["j k", "next and previous row of a list; Enter opens it"],
  ["?", "this list; Esc closes it"],
];
let more = [];

// keys: [[key, text, function]]; they hold until the signal is aborted.
export function onkey(keys, signal) {
  for (const [key, , work] of keys) ours.set(key, work);
  more = [...more, ...keys.map(([key, text]) => [key, text])];
  signal.addEventListener("abort", () => {
    for (const [key] of keys) ours.delete(key);
    more = more.filter(([key]) => !keys.some(([own]) => own === key));
  });
}

export function startKeys() {
  const help = document.getElementById("help");
  const open = () => {
    clear(
      help,
      h("h2", {}, "Keys"),
      h(
        "dl.keys",
        {},
        [...shown, ...more].map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]),
      ),
      h("form", { method: "dialog" }, h("button", {}, "close")),
    );
    help.showModal();
  };
  document.getElementById("keys").addEventListener("click", open);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || writing(event.target) || help.open) return;
    const work = ours.get(event.key) || common[event.key];
    if (event.key === "?") open();
    else if (work) work(event);
    else return;
    event.preventDefault();
  });
}

const common = {
  "/": () => document.getElementById("find-text").focus(),
  r: () => (location.hash = "#/"),
  b: () => (location.hash = "#/behaviour"),
  m: () => (location.hash = "#/machines"),
  j: () => move(1),
  k: () => move(-1),
};

function move(by) {
  const rows = [...document.querySelectorAll("#page [data-row]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement.closest("[data-row]"));
  const next = rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + by))];
  next.focus();
}

function writing(element) {
  return element instanceof HTMLElement && (element.matches("input, textarea, select") || element.isContentEditable);
}
