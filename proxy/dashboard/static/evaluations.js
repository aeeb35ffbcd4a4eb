// Evaluations of training runs as a matrix: policies before and after their training, by agent and kind of task.

import { h, clear, trouble } from "./dom.js";
import { ask, name as part } from "./api.js";
import { num } from "./format.js";
import { reward, section, table, toRun } from "./parts.js";

const PAUSE = 20000; // milliseconds from a change to the next look, which reads the tasks of several runs

// Returns what is to be called when groups of a run have ended.
export async function evaluationsOf(box, name, signal) {
  let due = null;
  const load = async () => {
    due = null;
    try {
      const got = await ask(`runs/${part(name)}/evaluations`, {}, signal);
      clear(box, got.lines.length ? section("Evaluations", matrix(got)) : null);
    } catch (error) {
      if (error.name !== "AbortError") clear(box, trouble(error));
    }
  };
  signal.addEventListener("abort", () => clearTimeout(due));
  await load();
  return () => {
    due ??= setTimeout(load, PAUSE);
  };
}

function matrix({ lines, older }) {
  const columns = [...new Set(lines.flatMap((line) => line.cells.map(column)))].sort();
  return [
    table(
      ["evaluation", "step", "trained with", ...columns],
      lines.map((line) => row(line, columns)),
      { caption: "mean rewards of policies, by agent and kind of task" },
    ),
    h(
      "p.quiet",
      {},
      "The first and the last finished evaluation of each training run. ",
      "Held out are agents and tasks that a run was not trained with.",
      older ? " Older evaluations are not looked at." : "",
    ),
  ];
}

function row(line, columns) {
  const cells = new Map(line.cells.map((cell) => [column(cell), cell]));
  return h(
    "tr",
    {},
    h("td", {}, h("a", { href: toRun(line.evaluation), "data-row": true }, line.evaluation)),
    h("td", {}, num(line.step)),
    h("td", {}, line.trained.join(", ") || "nothing yet"),
    columns.map((name) => h("td", {}, cells.has(name) ? outcome(cells.get(name)) : "–")),
  );
}

function column(cell) {
  return [cell.agent_held_out ? `${cell.agent} (held out)` : cell.agent, cell.tasks].filter(Boolean).join(", ");
}

function outcome(cell) {
  const left = { missing: cell.rollouts - cell.masked - cell.rewards, masked: cell.masked };
  const words = Object.entries(left).flatMap(([name, count]) => (count ? [`${num(count)} ${name}`] : []));
  return [reward(cell.reward), h("span.quiet", {}, ` ${[`of ${num(cell.rewards)}`, ...words].join(", ")}`)];
}
