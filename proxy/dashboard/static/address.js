// The part of the address behind the #: which page, and what it shows. Every view has an address of its own.

export function here() {
  const [path, query] = (location.hash.replace(/^#/, "") || "/").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, params: new URLSearchParams(query || "") };
}

// A list stands as often as it has entries: names of metrics and runs may hold any sign.
export function query(params) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const each of [value].flat()) {
      if (each !== undefined && each !== null && each !== "") made.append(key, String(each));
    }
  }
  return made.toString();
}

export function link(parts, params = {}) {
  const text = query(params);
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

// Changes what the present page shows, without a step in the history.
export function remember(changes) {
  const { parts, params } = here();
  const present = Object.fromEntries([...params.keys()].map((key) => [key, params.getAll(key)]));
  const target = link(parts, { ...present, ...changes });
  if (target !== location.hash) history.replaceState(null, "", target);
}

// Names what the present page shows where its address left that open, without a step in the history.
export function settle(parts) {
  const { params } = here();
  history.replaceState(null, "", link(parts, Object.fromEntries(params)));
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
