// Figures of the steps of a run by their names, asked for in as many requests as they need.

import { ask, name as part } from "./api.js";

const MOST = 8; // curves of a family
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

// wanted: names; one that ends with / stands for its family. [those that are drawn, how many further ones there are]
export function expanded(wanted, known) {
  let left = 0;
  const drawn = wanted.flatMap((each) => {
    if (!each.endsWith("/")) return known.includes(each) ? [each] : [];
    const family = known.filter((name) => name.startsWith(each));
    left += Math.max(0, family.length - MOST);
    return family.slice(0, MOST);
  });
  return [drawn, left];
}

export function notDrawn(left, what = "one") {
  return left === 1 ? `1 further ${what} is not drawn` : `${left} further ${what}s are not drawn`;
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
