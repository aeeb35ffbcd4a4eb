// The part of the address behind the #: which page, and what it shows. Every view has an address of its own.

export function here() {
  const [path, query] = (location.hash.replace(/^#/, "") || "/").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, params: new URLSearchParams(query || "") };
}

export function link(parts, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, String(value));
  }
  const text = query.toString();
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

// Changes what the present page shows, without a step in the history.
export function remember(changes) {
  const { parts, params } = here();
  const merged = Object.fromEntries(params);
  const target = link(parts, { ...merged, ...changes });
  if (target !== location.hash) history.replaceState(null, "", target);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
