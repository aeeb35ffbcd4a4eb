// Figures of the steps of a run by their names, asked for in as many requests as they need.

import { ask, name as part } from "./api.js";

const AT_ONCE = 60; // names of a request
const LONGEST = 6000; // characters of their names in an address

export async function figuresOf(run, names, given, signal) {
  const all = { steps: [], values: {}, histograms: {} };
  for (const some of batches(names)) {
    const page = await ask(`runs/${part(run)}/curves`, { ...given, names: some }, signal);
    Object.assign(all, {
      ...page,
      values: { ...all.values, ...page.values },
      histograms: { ...all.histograms, ...page.histograms },
    });
  }
  return all;
}

function batches(names) {
  const made = [[]];
  let size = 0;
  for (const each of names) {
    const own = part(each).length + "&names=".length;
    if (made.at(-1).length === AT_ONCE || (size + own > LONGEST && made.at(-1).length)) {
      made.push([]);
      size = 0;
    }
    made.at(-1).push(each);
    size += own;
  }
  return made;
}
