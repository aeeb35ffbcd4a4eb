// A field for the name of a run, which offers those of the pool that have what is written in it.

import { h, clear } from "./dom.js";
import { ask } from "./api.js";

const PAUSE = 150; // milliseconds after the last key until the pool is asked
let fields = 0;

// given: attributes of the input. Returns it with its list, and what asks for the names that fit now.
export function runField(given, signal, stepped = false) {
  const id = `run-names-${(fields += 1)}`;
  const names = h("datalist", { id });
  let due = null;
  const offered = async () => {
    const got = await ask("run-names", { like: field.value.trim(), stepped: stepped ? 1 : null }, signal);
    clear(
      names,
      got.names.map((each) => h("option", { value: each })),
    );
    return got.names;
  };
  const offer = () => offered().catch(() => {}); // the names are a help; whoever uses one hears what is wrong
  const later = () => {
    clearTimeout(due);
    due = setTimeout(offer, PAUSE);
  };
  const field = h("input", { list: id, maxlength: 200, autocomplete: "off", onfocus: offer, oninput: later, ...given });
  return { parts: [field, names], offered };
}

// stepped: only runs with published weights; chosen: called with the name of a run that the pool has.
export function runChoice(label, { stepped = false, chosen }, signal) {
  const take = async (event) => {
    const field = event.target;
    const name = field.value.trim();
    field.setCustomValidity("");
    if (!name) return;
    try {
      if ((await offered()).includes(name)) {
        field.value = "";
        chosen(name);
        return;
      }
      field.setCustomValidity(stepped ? "no run with published weights has this name" : "no run has this name");
    } catch (error) {
      if (error.name === "AbortError") return;
      field.setCustomValidity(error.message);
    }
    field.reportValidity();
  };
  const given = { placeholder: label, "aria-label": label, size: 24, onchange: take };
  const { parts, offered } = runField(given, signal, stepped);
  return parts;
}
