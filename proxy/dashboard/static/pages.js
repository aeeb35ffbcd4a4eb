// The pages, by the first part of their address.

import { attempt } from "./pages/attempt.js";
import { behaviour } from "./pages/behaviour.js";
import { group } from "./pages/group.js";
import { machines } from "./pages/machines.js";
import { rollout } from "./pages/rollout.js";
import { run } from "./pages/run.js";
import { runs } from "./pages/runs.js";
import { search } from "./pages/search.js";

export const PAGES = { "": runs, run, group, rollout, attempt, behaviour, machines, search };

// name, text, further pages under it
export const NAV = [
  ["", "Runs", ["run", "group", "rollout", "attempt"]],
  ["behaviour", "Behaviour", []],
  ["machines", "Machines", []],
  ["search", "Search", []],
];
