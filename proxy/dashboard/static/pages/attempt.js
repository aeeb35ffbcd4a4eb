// An attempt by itself: a session of an agent that no run started, or an attempt that another one replaced.

import { h, clear } from "../dom.js";
import { ask } from "../api.js";
import { link } from "../address.js";
import { crumbs, toRun } from "../parts.js";
import { attemptView } from "../attemptview.js";

export async function attempt(box, { parts, params, signal }) {
  const id = Number(parts[0]) || 0;
  const got = await ask(`attempts/${id}`, {}, signal);
  const body = h("div");
  box.append(
    crumbs(
      ["Runs", "#/"],
      got.run ? [got.run, toRun(got.run)] : ["sessions", "#/"],
      ...(got.rollout_id === null ? [] : [[`rollout ${got.rollout_id}`, link(["rollout", got.rollout_id])]]),
      [`attempt ${id}`],
    ),
    h("h1", {}, got.run ? `Attempt ${got.number + 1} at rollout ${got.rollout_id}` : `Session ${id}`),
    body,
  );
  const shown = await attemptView(body, got, params, signal);
  return { changed: shown.changed, end: shown.end };
}
