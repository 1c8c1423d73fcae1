// The steps of a read model's generations: states what each one does, and sends it.

import { ask } from "./api.js";
import { open, state } from "./decision.js";
import { byId, h } from "./dom.js";
import { quoted } from "./shell.js";

const SWITCHES = [
  ["when_equal", "if all states are equal"],
  ["always", "in any case"],
  ["never", "when an operator switches"],
];
const KEEP_OLD_SECONDS = "86400";
const MOST_SECONDS = "315360000";
const MOST_RATE = "1000000000";

const taken = new Set();

// Calls back with the generations of a read model when a step was accepted.
export function onStep(callback) {
  taken.add(callback);
}

export function rebuild(model) {
  const chosen = () => byId("decision-form").elements;
  const decision = {
    title: `Rebuild ${model}`,
    commandOf: (reason) => {
      const { when, keepOld, maxRate } = chosen();
      const limit = maxRate.value && ` --max-rate ${maxRate.value}`;
      return `balance-service rebuild ${model} --switch ${when.value.replace("_", "-")} --keep-old ${keepOld.value}${limit} --reason ${quoted(reason)} --detach`;
    },
    carryOut: (reason) => {
      const { when, keepOld, maxRate } = chosen();
      const limit = maxRate.value ? { maxRate: Number(maxRate.value) } : {};
      return sent("rebuild", { model, switch: when.value, keepOld: Number(keepOld.value), ...limit, reason });
    },
  };
  const effect = [
    h("p", {}, "A new generation replays the topic from its beginning, while the serving one goes on. Until it is dropped, it needs as much memory and disk again."),
    field("It serves once it has caught up", h("select", { name: "when" }, SWITCHES.map(([value, text]) => h("option", { value }, text)))),
    field("Seconds to keep the old generation after the switch", h("input", { name: "keepOld", type: "number", min: "0", max: MOST_SECONDS, required: true, value: KEEP_OLD_SECONDS })),
    field("Events per second that each instance replays at most", h("input", { name: "maxRate", type: "number", min: "1", max: MOST_RATE, placeholder: "no limit" })),
  ];
  confirm(decision, effect, "Rebuild");
}

const field = (label, input) => h("label", { class: "block" }, `${label} `, input);

// `serving` and `to` are generations of the answer; `differs`: they do not have the same states.
export function switchTo({ model }, serving, to, differs) {
  const decision = {
    title: `Switch ${model} to generation ${to.generation}`,
    sure: differs ? "I have looked at the differences, and want these answers." : "",
    commandOf: (reason) => `balance-service switch ${model} --to ${to.generation} --reason ${quoted(reason)}`,
    carryOut: (reason) => sent("switch", { model, to: to.generation, reason }),
  };
  const effect = `Generation ${to.generation} serves from now on. Generation ${serving.generation} is kept and folded silently until it is dropped: until then, a switch back is possible.`;
  confirm(decision, h("p", {}, effect), `Switch to generation ${to.generation}`);
}

export function drop({ model }, { generation, status }) {
  const decision = {
    title: `Drop generation ${generation} of ${model}`,
    sure: `I know that the states of generation ${generation} are lost.`,
    isDanger: true,
    commandOf: (reason) => `balance-service drop ${model} --generation ${generation} --reason ${quoted(reason)}`,
    carryOut: (reason) => sent("drop", { model, generation, reason }),
  };
  const lost = status === "kept" ? "There is no way to switch back to it afterwards." : "This cancels its rebuild.";
  const effect = `The changelog and the stores of generation ${generation} are deleted. ${lost} The serving generation is not affected.`;
  confirm(decision, h("p", {}, effect), `Drop generation ${generation}`);
}

function confirm(decision, effect, label) {
  const whole = { panel: "generations", sure: "", isDanger: false, ...decision };
  open(whole);
  state(whole, effect, label);
}

async function sent(step, body) {
  const found = JSON.parse((await ask(`api/models.${step}`, { body })).text);
  for (const callback of taken) callback(found);
  return h("p", { role: "status" }, h("strong", {}, "Accepted."), " The instances carry it out; the panel follows them.");
}
