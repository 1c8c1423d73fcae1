// A row for each read model, worst first.

import { byId, h, show, table } from "./dom.js";
import { behind, count, mark, progress, rate, UNKNOWN } from "./format.js";
import { modelsOf } from "./judge.js";
import { live, rateOf, secondsLeft } from "./live.js";
import { runbookLink } from "./runbook.js";
import { linkTo } from "./url.js";

const COLUMNS = [
  ["Read model", ""],
  ["State", ""],
  ["Lag, records", "number"],
  ["Lag, time", "number"],
  ["Rate", "number"],
  ["Dead letters that heal themselves", "number"],
  ["Dead letters that need you", "number"],
  ["Partitions of an instance", "number"],
  ["Standbys ready", "number"],
];

export function showModels() {
  if (!live.status) {
    show(byId("models-table"), h("p", { class: "empty" }, UNKNOWN));
    return;
  }
  const models = modelsOf(live.status);
  if (!models.length) {
    show(byId("models-table"), h("p", { class: "empty" }, "No read model is known yet: this instance is starting."));
    return;
  }
  show(byId("models-table"), table("Read models", COLUMNS, models.map(row)));
}

function row(model) {
  const lettersLink = (status, number) =>
    number ? h("a", { href: linkTo({ at: "letters", lettersModel: model.name, lettersStatus: status }) }, count(number)) : "0";
  const letters = (status, number) => (model.lettersAreKnown || number ? lettersLink(status, number) : UNKNOWN);
  return {
    key: model.name,
    cells: [
      h("a", { href: linkTo({ at: "partitions", partitionsModel: model.name }) }, model.name),
      stateOf(model),
      count(model.lag),
      behind(model.lagSeconds, model.lagSecondsIsLeast),
      live.state === "live" ? rate(rateOf(model.stage)) : UNKNOWN,
      letters("scheduled", model.heals),
      letters("waiting", model.needs),
      ownedOf(model),
      standbysOf(model),
    ],
  };
}

function stateOf(model) {
  const { verdict, restore, problems } = model;
  const where = problems.filter((one) => one.verdict === verdict).map((one) => one.partition);
  const reason = problems.find((one) => one.reason)?.reason ?? "";
  return h(
    "div",
    { class: "state" },
    mark(verdict.kind, verdict.word),
    where.length ? ` partition${where.length > 1 ? "s" : ""} ${where.join(", ")}` : "",
    restore ? progress(`Restore of ${model.name}`, restore.part, restore.secondsLeft) : "",
    reason ? h("span", { class: "reason" }, reason) : "",
    verdict.section ? [" ", runbookLink(verdict.section)] : "",
    model.others.map((other) => otherOf(model, other)),
  );
}

// A generation that does not serve.
function otherOf({ name }, { stage, generation, status, part, lag }) {
  const link = h("a", { href: linkTo({ at: "generations", generationsModel: name }) }, `generation ${generation}`);
  const isBuilding = status === "building";
  const bar = isBuilding ? progress(`Rebuild of ${name}`, part, secondsLeft(stage, lag)) : "";
  return h("span", { class: "reason", "data-key": stage }, link, ` ${status || UNKNOWN}`, bar);
}

function ownedOf({ owned }) {
  if (owned === null) return UNKNOWN;
  const { fewest, most } = owned;
  if (fewest === most) return String(most);
  // Between joins and leaves of instances, the numbers differ by one at most.
  return most - fewest > 1 ? mark("warn", `${fewest} to ${most}`) : `${fewest} to ${most}`;
}

function standbysOf({ standbys: { ready, wanted } }) {
  if (wanted === null) return String(ready);
  if (wanted === 0 && ready === 0) return "none asked for";
  return ready < wanted ? mark("warn", `${ready} of ${wanted}`) : `${ready} of ${wanted}`;
}
