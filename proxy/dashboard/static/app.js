// Picks the page that the address names, and tells it when its pool changes.

import { h, clear, trouble } from "./dom.js";
import { here, link } from "./address.js";
import { listen } from "./api.js";
import { NAV, PAGES } from "./pages.js";
import { startKeys } from "./keys.js";

const main = document.getElementById("page");
const nav = document.getElementById("nav");
let present = null;
let turn = 0;

async function show() {
  const { parts, params } = here();
  const key = parts[0] || "";
  const page = PAGES[key];
  const own = (turn += 1);
  if (present && present.stays && present.key === key && (await present.stays(parts, params))) return;
  end();
  const stop = new AbortController();
  const box = h("div.page", { "aria-busy": "true" });
  clear(main, box);
  drawNav(key);
  present = { key, stop };
  try {
    if (!page) throw new Error(`there is no page ${key}; the links above lead to those that there are`);
    const shown = (await page(box, { parts: parts.slice(1), params, signal: stop.signal })) || {};
    if (own !== turn) return;
    present = { ...shown, key, stop };
  } catch (error) {
    if (stop.signal.aborted) return;
    box.append(trouble(error));
  } finally {
    box.removeAttribute("aria-busy");
  }
  const title = main.querySelector("h1");
  document.title = title ? `${title.textContent} · blackforge` : "blackforge";
}

function end() {
  if (!present) return;
  present.stop.abort();
  if (present.end) present.end();
  present = null;
}

function drawNav(key) {
  clear(
    nav,
    NAV.map(([name, text, also]) =>
      h(
        "a",
        { href: link(name ? [name] : []), "aria-current": key === name || also.includes(key) ? "page" : null },
        text,
      ),
    ),
  );
}

let waiting = new Set();
let timer = null;

function changed(parts) {
  for (const part of parts) waiting.add(part);
  if (timer !== null) return;
  timer = setTimeout(async () => {
    const some = waiting;
    waiting = new Set();
    timer = null;
    if (present && present.changed && !document.hidden) await present.changed(some);
  }, 300);
}

const TEXTS = { live: "live", lost: "no connection", trouble: "no pool" };

function state(which, why = "") {
  const element = document.getElementById("live");
  element.textContent = TEXTS[which];
  element.dataset.state = which;
  element.title = why;
}

function startTheme() {
  const root = document.documentElement;
  const kept = localStorage.getItem("theme");
  if (kept) root.dataset.theme = kept;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    document.dispatchEvent(new Event("theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new Event("theme")),
  );
}

document.getElementById("find").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = link(["search"], { q: document.getElementById("find-text").value });
});
startTheme();
startKeys();
window.addEventListener("hashchange", show);
show();
listen(changed, state);
