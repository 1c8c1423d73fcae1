// A row for each read model, worst first.

import { byId, h, show, table } from "./dom.js";
import { behind, count, mark, progress, rate, UNKNOWN } from "./format.js";
import { modelsOf } from "./judge.js";
import { live, rateOf, secondsLeft } from "./live.js";
import { isOpen } from "./tabs.js";
import { linkTo } from "./url.js";

const COLUMNS = [
  ["Read model", ""],
  ["State", ""],
  ["Lag", "number"],
  ["Rate", "number"],
  ["Dead letters", "number"],
  ["Partitions of an instance", "number"],
  ["Standbys ready", "number"],
];

export function showModels() {
  if (!isOpen("overview")) return;
  if (!live.status) {
    show(byId("models-table"), h("p", { class: "empty" }, UNKNOWN));
    return;
  }
  // A starting instance knows of none.
  const models = live.status.partitions === null ? [] : modelsOf(live.status);
  if (!models.length) {
    show(byId("models-table"), h("p", { class: "empty" }, "No read model is known yet: this instance is starting."));
    return;
  }
  show(byId("models-table"), table("Read models", COLUMNS, models.map(row)));
}

function row(model) {
  return {
    key: model.name,
    cells: [
      h("a", { href: linkTo({ at: "partitions", partitionsModel: model.name }) }, model.name),
      stateOf(model),
      model.lag ? `${count(model.lag)} (${behind(model.lagSeconds, model.lagSecondsIsLeast)})` : count(model.lag),
      live.state === "live" ? rate(rateOf(model.stage)) : UNKNOWN,
      lettersOf(model),
      ownedOf(model),
      standbysOf(model),
    ],
  };
}

// What is wrong stands above, once.
function stateOf(model) {
  const { verdict, restore } = model;
  const where = verdict.partitions;
  return h(
    "div",
    { class: "state" },
    mark(verdict.kind, verdict.word, verdict.cause?.what),
    where.length ? ` partition${where.length > 1 ? "s" : ""} ${where.join(", ")}` : "",
    restore ? progress(`Restore of ${model.name}`, restore.part, restore.secondsLeft) : "",
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

function lettersOf({ name, heals, needs, lettersAreKnown }) {
  const link = (status, text) => h("a", { href: linkTo({ at: "letters", lettersModel: name, lettersStatus: status }) }, text);
  const found = [];
  if (needs) found.push(link("", `${count(needs)} need you`));
  if (heals) found.push(link("scheduled", `${count(heals)} heal themselves`));
  if (found.length) return found.flatMap((one, n) => (n ? [", ", one] : [one]));
  return lettersAreKnown ? "0" : UNKNOWN;
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
