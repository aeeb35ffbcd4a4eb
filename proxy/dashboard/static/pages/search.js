// Search: words in replies and results, and filters of rollouts.

import { h, clear, trouble } from "../dom.js";
import { ask } from "../api.js";
import { link, remember } from "../address.js";
import { ago, num, words } from "../format.js";
import { badge, fromTheTop, more, reward, row, table } from "../parts.js";
import { runField } from "../runname.js";

const FIELDS = [
  "q",
  "run",
  "event",
  "failure",
  "agent",
  "domain",
  "least_reward",
  "most_reward",
  "no_reward",
  "least_calls",
  "most_calls",
  "least_tokens",
  "most_tokens",
];

// Questions that one has about a run, each a set of filters
const QUESTIONS = [
  ["failed", { most_reward: 0 }],
  ["failed in a retry loop", { event: "retry_loop", most_reward: 0 }],
  ["failed and repeated a call", { event: "repeated_call", most_reward: 0 }],
  ["failed with a reply that repeats itself", { event: "repetition", most_reward: 0 }],
  ["gave up", { event: "giving_up" }],
  ["was cut at a limit", { event: "truncated" }],
  ["edited a test", { event: "test_edited" }],
  ["has no reward", { no_reward: 1 }],
];

export async function search(box, { params, signal }) {
  const state = await ask("search/index", {}, signal);
  const value = (name) => params.get(name) || "";
  const input = (name, text, given = {}) =>
    h("label", {}, h("span", {}, text), h("input", { name, value: value(name), maxlength: 200, ...given }));
  const choice = (name, text, options) =>
    h(
      "label",
      {},
      h("span", {}, text),
      h(
        "select",
        { name },
        options.map(([key, shown]) => h("option", { value: key, selected: key === value(name) }, shown)),
      ),
    );
  const form = h(
    "form.filters",
    {
      onsubmit: (event) => {
        event.preventDefault();
        const data = new FormData(form);
        location.hash = link(["search"], Object.fromEntries(FIELDS.map((name) => [name, data.get(name) || ""])));
      },
    },
    input("q", "words", { type: "search", placeholder: 'No such file, "exact phrase", begin*' }),
    h(
      "label",
      {},
      h("span", {}, "run"),
      runField({ name: "run", value: value("run"), placeholder: "every run" }, signal).parts,
    ),
    choice("event", "event", [["", "any or none"], ...state.kinds.map((kind) => [kind, words(kind)])]),
    choice("failure", "failure", [
      ["", "any or none"],
      ["any", "some failure"],
      ["none", "no failure"],
      ...state.failures.map((kind) => [kind, kind]),
    ]),
    input("least_reward", "reward from", { type: "number", step: "any" }),
    input("most_reward", "to", { type: "number", step: "any" }),
    h(
      "label.check",
      {},
      h("input", { type: "checkbox", name: "no_reward", value: "1", checked: value("no_reward") !== "" }),
      h("span", {}, "without a reward"),
    ),
    input("least_calls", "calls from", { type: "number", min: 0 }),
    input("most_calls", "to", { type: "number", min: 0 }),
    input("least_tokens", "tokens from", { type: "number", min: 0 }),
    input("most_tokens", "to", { type: "number", min: 0 }),
    input("agent", "agent"),
    input("domain", "domain"),
    h("button", { type: "submit" }, "search"),
  );
  const questions = h(
    "p.tools",
    {},
    h("span.quiet", {}, "which rollout"),
    QUESTIONS.map(([text, filters]) =>
      h("a.chip", { href: link(["search"], { ...filters, run: value("run") }) }, text),
    ),
  );
  const note = h("p.quiet", { role: "status" });
  const list = h("div.hits");
  const further = h("p");
  const wanted = Object.fromEntries(FIELDS.map((name) => [name, value(name)]));
  const start = params.get("before");
  const top = start === null ? "" : fromTheTop(link(["search"], wanted), "all hits");
  box.append(h("h1", {}, "Search"), questions, form, note, top, list, further);
  document.getElementById("find-text").value = value("q");
  let shown = [];

  async function load(before = null) {
    try {
      const page = await ask("search", { ...wanted, before }, signal);
      shown = before === null ? page.hits : [...shown, ...page.hits];
      tell(note, page.index);
      remember({ before });
      clear(list, wanted.q ? calls(shown) : rollouts(shown, wanted.event, page.before === null));
      clear(
        further,
        page.before === null
          ? null
          : more(shown.length ? "further hits" : "none among the newest; look further", () => load(page.before)),
      );
      if (!shown.length && page.before === null) clear(list, h("p.none", {}, "nothing in the index is like that"));
    } catch (error) {
      if (error.name !== "AbortError") clear(list, trouble(error));
    }
  }

  tell(note, state);
  await load(start);
}

function tell(note, state) {
  const { progress, trouble: why } = state;
  if (why) note.textContent = why;
  else if (!progress) note.textContent = "The index is being made; come back in a moment.";
  else if (progress.whole && progress.outcomes_whole)
    note.textContent = `All ${num(progress.calls)} calls and ${num(progress.rollouts)} finished rollouts are in the index ${state.file}.`;
  else
    note.textContent = `The index grows, newest first: ${num(progress.calls)} calls (#${progress.oldest} to #${progress.newest} of ${progress.last}) and ${num(progress.rollouts)} rollouts so far.`;
}

function address(hit) {
  const at = { call: hit.call, attempt: hit.attempt_id };
  return hit.rollout_id === null
    ? link(["attempt", hit.attempt_id], { call: hit.call })
    : link(["rollout", hit.rollout_id], at);
}

function calls(hits) {
  return h(
    "ol.found",
    {},
    hits.map((hit) =>
      h(
        "li",
        {},
        h(
          "p",
          {},
          h(
            "a",
            { href: address(hit), "data-row": true },
            hit.task ? `${hit.task}, call ${hit.ordinal}` : `session ${hit.attempt_id}, call ${hit.ordinal}`,
          ),
          " ",
          hit.rollout_id === null ? badge("session", "quiet") : reward(hit.reward),
          " ",
          hit.failure ? [badge(hit.failure, "bad"), " "] : null,
          hit.label && hit.label !== "main" ? [badge(hit.label, "quiet"), " "] : null,
          h(
            "span.quiet",
            {},
            [hit.run, hit.agent, hit.step === null ? null : `step ${hit.step}`, ago(hit.finished_at)]
              .filter(Boolean)
              .join(" · "),
          ),
        ),
        h(
          "pre.text",
          {},
          hit.where ? h("span.quiet", {}, `${hit.where}: `) : null,
          hit.before,
          hit.word ? h("mark", {}, hit.word) : null,
          hit.after,
        ),
      ),
    ),
  );
}

function rollouts(hits, event, whole) {
  const heads = [
    "rollout",
    "reward",
    "failure",
    "run",
    "agent",
    "step",
    "calls",
    "tokens",
    event ? words(event) : "",
    "ended",
  ];
  return table(
    heads,
    hits.map((hit) =>
      row(
        link(["rollout", hit.rollout_id]),
        `${hit.task}, member ${hit.member}`,
        reward(hit.reward),
        hit.failure ? badge(hit.failure, "bad") : "",
        hit.run,
        hit.agent,
        num(hit.step),
        num(hit.calls),
        num(hit.tokens),
        event ? num(hit.events) : "",
        ago(hit.finished_at),
      ),
    ),
    { empty: whole ? "nothing in the index is like that" : "", caption: "rollouts" },
  );
}
