// What the agent printed, from the end back to the beginning.

import { h, clear } from "./dom.js";
import { ask } from "./api.js";
import { bytes } from "./format.js";
import { more } from "./parts.js";

const PIECE = 100000;

export async function logOf(box, attempt, signal) {
  const last = await ask(`attempts/${attempt}/log`, {}, signal);
  if (last.missing) {
    box.append(h("p.none", {}, last.missing));
    return {};
  }
  const before = h("p");
  const text = h("pre.text.log", { tabindex: "0" });
  let from = last.offset;
  const offer = () =>
    clear(
      before,
      from === 0
        ? null
        : more(`earlier, ${bytes(from)}`, async () => {
            const start = Math.max(0, from - PIECE);
            const piece = await ask(`attempts/${attempt}/log`, { offset: start, until: from }, signal);
            text.prepend(h("span", {}, piece.text));
            from = start;
            offer();
          }),
    );
  text.append(h("span", {}, last.text || "it printed nothing"));
  offer();
  box.append(
    h("p.quiet", {}, `${last.file}, ${bytes(last.total)}; control characters are shown as signs`),
    before,
    text,
  );
  return {};
}
