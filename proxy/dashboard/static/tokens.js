// The tokens of a call with their boundaries: colour by one figure, all figures under the pointer or the cursor.

import { h, clear } from "./dom.js";
import { ask } from "./api.js";
import { here, remember } from "./address.js";
import { NOTHING, num, percent } from "./format.js";
import { inPool, placed } from "./parts.js";

const LEVELS = 6;
const COLOURS = [
  ["logprob", "logprob: darker is less likely"],
  ["advantage", "advantage: green above the baseline, red below"],
  ["coefficient", "coefficient: green becomes likelier, red less likely"],
  ["ratio", "ratio: green above 1, red below"],
  ["version", "version of the weights"],
  ["none", "no colour"],
];
const CONTEXT = 120; // tokens of the prompt that are shown before the answer

const PAUSE = 150; // milliseconds from a key to the address: browsers refuse to change it too often

export async function tokensOf(box, completion, signal) {
  const { params } = here();
  let chosen = place(params.get("token"));
  let due = null;
  let by = params.get("colour") || "logprob";
  let page = null;
  const figure = h(
    "select",
    {
      "aria-label": "colour by",
      onchange: () => {
        by = figure.value;
        remember({ colour: by === "logprob" ? "" : by });
        paint();
      },
    },
    COLOURS.map(([key, text]) => h("option", { value: key, selected: key === by }, text)),
  );
  const where = h("span.quiet");
  const notes = h("div");
  const text = h("div.tokens", {
    tabindex: "0",
    role: "group",
    "aria-label": "tokens; arrow keys go from one to the next",
  });
  const tip = h(
    "div.tip",
    { role: "status", "aria-live": "polite" },
    "point at a token, or go through them with the arrow keys",
  );
  const buttons = h("span");
  box.append(h("p.tools", {}, figure, " ", buttons, " ", where), notes, tip, text);

  async function load(offset) {
    page = await ask(`completions/${completion}/tokens`, { offset }, signal);
    chosen = null;
    remember({ token: null, tokens: page.offset });
    draw();
  }

  async function begin() {
    const given = place(params.get("tokens")) ?? (chosen === null ? null : Math.max(0, chosen - CONTEXT));
    page = await ask(`completions/${completion}/tokens`, { offset: given ?? 0 }, signal);
    const start = Math.max(0, page.prompt_length - CONTEXT);
    const seen = page.offset + page.ids.length;
    if (given === null && start > 0 && seen < page.total)
      page = await ask(`completions/${completion}/tokens`, { offset: start }, signal);
    draw();
  }

  function choose(span, pause = 0) {
    tell(span);
    chosen = page.offset + Number(span.dataset.at);
    clearTimeout(due);
    due = setTimeout(() => remember({ token: chosen, tokens: page.offset }), pause);
  }

  function draw() {
    const last = page.offset + page.ids.length;
    where.textContent = `tokens ${num(page.offset)} to ${num(last)} of ${num(page.total)}; the prompt has ${num(page.prompt_length)}${page.step === null ? "" : `; trained in step ${page.step}`}`;
    clear(
      notes,
      page.notes.map((note) => h("p.note", {}, note)),
      page.tokenizer === null ? null : h("p.quiet", {}, `the texts are by the tokenizer in ${page.tokenizer}`),
    );
    const size = page.ids.length;
    clear(
      buttons,
      page.offset > 0
        ? h("button", { type: "button", onclick: () => load(Math.max(0, page.offset - 2000)) }, "earlier tokens")
        : null,
      " ",
      last < page.total ? h("button", { type: "button", onclick: () => load(last) }, "later tokens") : null,
    );
    clear(
      text,
      Array.from({ length: size }, (_, at) => token(at)),
    );
    paint();
    const pointed = chosen === null ? null : text.children[chosen - page.offset];
    if (pointed) tell(pointed);
  }

  function token(at) {
    const kind =
      page.offset + at < page.prompt_length
        ? page.by[at] === null
          ? "prompt"
          : "earlier"
        : page.given[at]
          ? "given"
          : "answer";
    const own = h(`span.${kind}`, { "data-at": at }, page.texts[at].replace(/\n/g, "↵\n") || "∅");
    if (page.offset + at === page.prompt_length) own.classList.add("first");
    return own;
  }

  function paint() {
    const versions = [...new Set(page.versions.filter(Boolean))];
    const strongest = (values) => Math.max(1e-9, ...values.filter((value) => value !== null).map(Math.abs));
    const most = { advantage: strongest(page.advantages), coefficient: strongest(page.coefficients) };
    for (const span of text.children) {
      const at = Number(span.dataset.at);
      span.classList.remove(...[...span.classList].filter((name) => /^[udlv]\d$/.test(name)));
      const shade = shadeOf(at, versions, most);
      if (shade) span.classList.add(shade);
    }
  }

  function shadeOf(at, versions, most) {
    if (by === "logprob") return page.logprobs[at] === null ? "" : `l${level(Math.min(1, -page.logprobs[at] / 6))}`;
    if (by === "version") return page.versions[at] ? `v${versions.indexOf(page.versions[at]) % 6}` : "";
    if (by === "ratio")
      return page.ratios[at] === null ? "" : signed(Math.log(Math.max(1e-9, page.ratios[at])) / Math.log(2));
    if (by === "none") return "";
    const value = (by === "advantage" ? page.advantages : page.coefficients)[at];
    return value === null ? "" : signed(value / most[by]);
  }

  function signed(share) {
    const strength = level(Math.sqrt(Math.min(1, Math.abs(share))));
    return strength ? `${share < 0 ? "d" : "u"}${strength}` : "";
  }

  function level(share) {
    return share > 0 ? Math.max(1, Math.round(LEVELS * share)) : 0;
  }

  function tell(span) {
    const at = Number(span.dataset.at);
    text.querySelector(".here")?.classList.remove("here");
    span.classList.add("here");
    const sampled = page.by[at] !== null;
    const parts = [
      ["text", JSON.stringify(page.texts[at])],
      ["id", String(page.ids[at])],
      ["place", String(page.offset + at)],
      sampled
        ? [
            "logprob",
            page.logprobs[at] === null
              ? NOTHING
              : `${num(page.logprobs[at], 4)} (${percent(Math.exp(page.logprobs[at]))})`,
          ]
        : null,
      sampled ? ["version", page.versions[at] || NOTHING] : null,
      sampled ? ["ratio", num(page.ratios[at], 4)] : null,
      sampled ? ["advantage", num(page.advantages[at], 4)] : null,
      sampled ? ["coefficient", num(page.coefficients[at], 4)] : null,
      sampled
        ? page.by[at] === completion
          ? null
          : ["sampled by", placed(page.by[at], page.ordinals[page.by[at]]), inPool(page.by[at])]
        : ["", page.given[at] ? "given: the proxy wrote it, it is never trained" : "of the prompt"],
    ].filter(Boolean);
    clear(
      tip,
      parts.map(([name, value, title]) => h("span", { title }, name ? `${name} ` : "", h("b", {}, value))),
    );
  }

  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-at]");
    if (span) tell(span);
  });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !text.children.length) return;
    event.preventDefault();
    const at = Number(text.querySelector(".here")?.dataset.at ?? Math.max(-1, page.prompt_length - page.offset - 1));
    const next = text.children[Math.max(0, Math.min(text.children.length - 1, at + by))];
    choose(next, PAUSE);
    if (next.offsetTop < text.scrollTop || next.offsetTop > text.scrollTop + text.clientHeight - 40)
      text.scrollTop = next.offsetTop - 80;
  });
  text.addEventListener("click", (event) => {
    const span = event.target.closest("[data-at]");
    if (span) choose(span);
  });
  await begin();
  return {
    placed: () => {
      const pointed = text.querySelector(".here");
      const first = pointed || text.querySelector(".first");
      if (first) text.scrollTop = first.offsetTop - 80;
      if (pointed) pointed.scrollIntoView({ block: "nearest" });
    },
    end: () => clearTimeout(due),
  };
}

// A place in an address; null for anything else.
function place(text) {
  return /^\d{1,9}$/.test(text ?? "") ? Number(text) : null;
}
