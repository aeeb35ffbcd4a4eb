// The account of a run: where every sampled token is.

import { h, clear } from "./dom.js";
import { ask, name as part } from "./api.js";
import { num, percent, words } from "./format.js";
import { table } from "./parts.js";

export async function accountOf(box, name, signal) {
  const now = await ask(`runs/${part(name)}/account`, {}, signal);
  const lines = [
    ["trained", now.trained, "good"],
    ...Object.entries(now.left_out).map(([reason, tally]) => [`left out: ${words(reason)}`, tally, "bad"]),
    ...Object.entries(now.waiting).map(([place, tally]) => [`waiting: ${place}`, tally, "watch"]),
  ];
  const total = now.sampled || 1;
  const bar = h(
    "div.stack",
    { role: "img", "aria-label": lines.map(([text, tally]) => `${text} ${percent(tally.tokens / total)}`).join(", ") },
    lines
      .filter(([, tally]) => tally.tokens > 0)
      .map(([text, tally, kind]) =>
        h(`i.${kind}`, { title: `${text}: ${num(tally.tokens)} tokens`, vars: { "flex-grow": String(tally.tokens) } }),
      ),
  );
  clear(
    box,
    now.unaccounted
      ? h(
          "p.trouble",
          { role: "alert" },
          `${num(now.unaccounted)} sampled tokens are in none of these places: rows are missing`,
        )
      : null,
    bar,
    table(
      ["tokens", "groups", "rollouts", "tokens", "share"],
      lines
        .map(([text, tally, kind]) =>
          h(
            "tr",
            {},
            h("td", {}, h(`i.mark.${kind}`), text),
            h("td", {}, num(tally.groups)),
            h("td", {}, num(tally.rollouts)),
            h("td", {}, num(tally.tokens)),
            h("td", {}, percent(tally.tokens / total)),
          ),
        )
        .concat(
          [
            ["of these, imitated", now.imitated],
            ["beside these, replayed", now.replayed],
          ]
            .filter(([, tally]) => tally.tokens)
            .map(([text, tally]) =>
              h(
                "tr",
                {},
                h("td", {}, text),
                h("td", {}, num(tally.groups)),
                h("td", {}, num(tally.rollouts)),
                h("td", {}, num(tally.tokens)),
                h("td", {}, percent(tally.tokens / total)),
              ),
            ),
        )
        .concat([h("tr", {}, h("td", {}, "sampled"), h("td"), h("td"), h("td", {}, num(now.sampled)), h("td"))]),
      { caption: "account" },
    ),
  );
}
