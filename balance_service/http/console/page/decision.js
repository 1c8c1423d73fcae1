// The dialog of what a reader decides: it states the effect, demands a reason, and shows the command that does the same.

import { byId, command, h, show, trouble } from "./dom.js";

let current = null;
let opener = null;

export const isDeciding = () => byId("decision").open;

export const isCurrent = (decision) => decision === current;

export function start() {
  byId("decision-cancel").onclick = () => byId("decision").close();
  byId("decision").onclose = () => {
    const { panel } = current;
    current = null;
    // The browser returns the focus to the button that opened the dialog, unless that is gone or disabled.
    if (document.activeElement !== opener) byId(panel).querySelector("h2").focus({ preventScroll: true });
  };
  byId("decision-form").oninput = offer;
  byId("decision-form").onsubmit = (event) => {
    event.preventDefault();
    if (current?.label) carryOut(current);
  };
}

// Opens the dialog. A decision has a `title`; `panel`, the id of the section that it belongs to; `sure`, what the reader
// confirms, or ""; `isDanger`; `commandOf(reason)`, a command line; and `carryOut(reason)`, which returns the outcome.
export function open(decision) {
  current = decision;
  opener = document.activeElement;
  show(byId("decision-title"), decision.title);
  byId("decision-reason").value = "";
  byId("decision-sure").checked = false;
  show(byId("decision-sure-text"), decision.sure);
  byId("decision-confirm").hidden = !decision.sure;
  byId("decision-do").hidden = true;
  byId("decision-do").classList.toggle("danger", decision.isDanger);
  byId("decision-cancel").textContent = "Cancel";
  for (const part of ["preview", "outcome", "command"]) show(byId(`decision-${part}`));
  byId("decision").showModal();
}

// States the effect. With a label for its button, the decision can be carried out.
export function state(decision, effect, label = "") {
  if (decision !== current) return;
  show(byId("decision-preview"), effect);
  byId("decision-do").textContent = decision.label = label;
  byId("decision-do").hidden = !label;
  offer();
  if (label) byId("decision-reason").focus();
}

function offer() {
  if (!current?.label) return;
  const reason = byId("decision-reason").value;
  byId("decision-do").disabled = !reason.trim() || (current.sure !== "" && !byId("decision-sure").checked);
  const line = `${current.commandOf(reason || "…")} --url ${location.origin}`;
  show(byId("decision-command"), h("h4", {}, "The same by command"), command(line));
}

// Tells how far the decision is carried out.
export function tell(decision, ...outcome) {
  if (decision === current) show(byId("decision-outcome"), outcome);
}

async function carryOut(decision) {
  decision.label = "";
  byId("decision-do").hidden = true;
  byId("decision-confirm").hidden = true;
  let outcome;
  try {
    outcome = await decision.carryOut(byId("decision-reason").value.trim());
  } catch (error) {
    outcome = trouble(error);
  }
  tell(decision, outcome);
  if (decision !== current) return;
  byId("decision-cancel").textContent = "Close";
  byId("decision-cancel").focus();
}
