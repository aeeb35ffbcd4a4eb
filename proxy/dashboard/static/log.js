// What the agent printed, from the end back to the beginning, or from the place that the address names.

import { h, clear } from "./dom.js";
import { ask } from "./api.js";
import { here, remember } from "./address.js";
import { bytes } from "./format.js";
import { more } from "./parts.js";

const PIECE = 100000;
const PAUSE = 200; // milliseconds without a movement until the place counts

export async function logOf(box, attempt, signal) {
  const wanted = /^\d{1,9}$/.test(here().params.get("log") || "") ? Number(here().params.get("log")) : null;
  const get = (offset, until) => ask(`attempts/${attempt}/log`, { offset, until }, signal);
  let first = await get(wanted);
  if (first.missing) {
    box.append(h("p.none", {}, first.missing));
    return {};
  }
  if (wanted !== null && first.offset >= first.total) first = await get(); // it has become shorter
  let { offset: from, next: to } = first;
  const before = h("p");
  const after = h("p");
  const text = h("pre.text.log", { tabindex: "0" }, first.blocks.length ? spans(first) : "it printed nothing");
  const offer = () => {
    clear(
      before,
      from === 0
        ? null
        : more(`earlier, ${bytes(from)}`, async () => {
            const piece = await get(Math.max(0, from - PIECE), from);
            text.prepend(...spans(piece));
            from = piece.offset;
            offer();
          }),
    );
    clear(
      after,
      to >= first.total
        ? null
        : more(`later, ${bytes(first.total - to)}`, async () => {
            const piece = await get(to);
            text.append(...spans(piece));
            to = piece.next;
            offer();
          }),
    );
  };
  offer();
  box.append(
    h(
      "p.quiet",
      {},
      `what the agent had printed when it ended: ${first.file}, ${bytes(first.total)}; control characters are shown as signs`,
    ),
    before,
    text,
    after,
  );
  let stop = () => {};
  return {
    placed: (pane) => {
      const place = wanted === null ? null : text.querySelector(`[data-at="${wanted}"]`);
      if (place) show(pane, place);
      stop = follow(pane, text);
    },
    end: () => stop(),
  };
}

// data-at: the byte of the log at which the lines of a span begin
function spans(piece) {
  return piece.blocks.map((block) => h("span", { "data-at": block.offset }, block.text));
}

const bar = () => document.querySelector(".bar").offsetHeight;
const top = (element) => element.getBoundingClientRect().top;

// Brings lines to the top. The pane moves, or on a phone the page.
function show(pane, lines) {
  const moves = pane.scrollHeight > pane.clientHeight;
  if (moves) pane.scrollTop += top(lines) - top(pane);
  window.scrollBy(0, top(moves ? pane : lines) - bar() - 8);
}

// Keeps the first lines in sight in the address.
function follow(pane, text) {
  let due = null;
  const note = () => {
    const edge = Math.max(top(pane), bar()) + 12;
    const lines = [...text.children].find((each) => each.getBoundingClientRect().bottom > edge);
    if (lines) remember({ log: lines.dataset.at });
  };
  const moved = () => {
    clearTimeout(due);
    due = setTimeout(note, PAUSE);
  };
  document.addEventListener("scroll", moved, { capture: true, passive: true });
  return () => {
    clearTimeout(due);
    document.removeEventListener("scroll", moved, { capture: true });
  };
}
