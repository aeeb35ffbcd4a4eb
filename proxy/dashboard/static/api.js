// Asks the dashboard's own server, and listens to what changes in the pool.

import { query } from "./address.js";

export async function ask(path, params = {}, signal = undefined) {
  const text = query(params);
  const response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal, credentials: "same-origin" });
  if (response.status === 401) throw new Error("This address has ended: open the one that `proxy dashboard` printed.");
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || `the server answered with ${response.status}`);
  return body;
}

export const name = encodeURIComponent;

// Calls `changed` with the names of the parts of the pool that changed, and `state` with how the line is.
export function listen(changed, state) {
  const source = new EventSource("/api/live");
  source.addEventListener("open", () => state("live"));
  source.addEventListener("error", () => state("lost"));
  source.addEventListener("trouble", (event) => state("trouble", JSON.parse(event.data).error));
  source.addEventListener("changed", (event) => {
    state("live");
    const { parts } = JSON.parse(event.data);
    if (parts.length) changed(new Set(parts));
  });
  return source;
}
