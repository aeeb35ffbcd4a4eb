// The pages, by the first part of their address.

import { attempt } from "./pages/attempt.js";
import { group } from "./pages/group.js";
import { rollout } from "./pages/rollout.js";
import { run } from "./pages/run.js";
import { runs } from "./pages/runs.js";

export const PAGES = { "": runs, run, group, rollout, attempt };

// name, text, further pages under it
export const NAV = [["", "Runs", ["run", "group", "rollout", "attempt"]]];
