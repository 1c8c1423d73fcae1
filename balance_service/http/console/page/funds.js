// Adds funds to a customer, and measures when the addition is visible.

import { addressOf, ask, askJson, exactJson, hasToken, text } from "./api.js";
import { catalogue, onCatalogue } from "./catalogue.js";
import { byId, command, h, show, trouble } from "./dom.js";
import { duration } from "./format.js";
import { troubleOf } from "./judge.js";
import { live } from "./live.js";
import { quoted, tokenOption } from "./shell.js";

const PATH = "api/balance.addFunds";
const VISIBLE = "api/models/balance/keys/";

// The idempotency key of the last addition: another addition needs another key, or it is refused as a repetition.
let sentKey = "";

export function start() {
  const form = byId("funds-form");
  form.onsubmit = (event) => {
    event.preventDefault();
    add(form.elements);
  };
  byId("funds-new").onclick = newKey;
  for (const name of ["customerId", "amount"]) {
    form.elements[name].oninput = () => {
      if (form.elements.idempotencyKey.value === sentKey) newKey();
    };
  }
  form.elements.idempotencyKey.value = freshKey();
  onCatalogue(offer);
}

// The command is part of the API only if the application has it.
async function offer() {
  if (!byId("funds").hidden || !catalogue.models.some(({ name }) => name === "balance")) return;
  const { paths } = await askJson("openapi.json").catch(() => ({ paths: {} }));
  byId("funds").hidden = !(`/${PATH}` in paths);
}

function newKey() {
  byId("funds-form").elements.idempotencyKey.value = freshKey();
}

// Browsers have `crypto.randomUUID` for pages of HTTPS and of this machine only.
function freshKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `console-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function add({ customerId, amount, idempotencyKey }) {
  const given = { customerId: customerId.value, amount: amount.value.trim() };
  const key = idempotencyKey.value;
  sentKey = key;
  const lines = [];
  const told = (...parts) => {
    lines.push(h("li", {}, parts));
    showOutcome(given, key, lines);
  };
  const began = performance.now();
  const seconds = () => duration((performance.now() - began) / 1000);
  try {
    // The amount goes as a text: a number of JavaScript would lose digits.
    const { headers } = await ask(PATH, { body: given, headers: { "Idempotency-Key": key } });
    const minPosition = headers.get("Balance-Position");
    told(`The event is in the topic, after ${seconds()}; visible at position ${minPosition}.`);
    newKey();
    const unanswered = troubleOf(live.status, "balance", minPosition);
    if (unanswered) told(h("span", { class: "waits" }, `It is not visible yet: ${unanswered}`));
    const answer = await ask(VISIBLE + encodeURIComponent(given.customerId), { parameters: { minPosition } });
    const server = answer.headers.get("Balance-Application-Server");
    told(`${server} shows it after ${seconds()}: the amount is `, h("strong", {}, text(exactJson(answer.text).value.amount)), ".");
    told("Sent again with the command below, which has the same idempotency key, it does not count twice.");
  } catch (error) {
    told(trouble(error));
  }
}

function showOutcome(given, key, lines) {
  const body = JSON.stringify(given);
  show(
    byId("funds-outcome"),
    h("ol", { role: "status" }, lines),
    h("h4", {}, "The same by command"),
    command(
      `curl -i -X POST ${addressOf(PATH).href} -H 'Content-Type: application/json' -H ${quoted(`Idempotency-Key: ${key}`)} -d ${quoted(body)}${tokenOption(hasToken())}`,
    ),
    command(`balance-service add-funds ${quoted(given.customerId)} ${quoted(given.amount)} --idempotency-key ${quoted(key)}`),
  );
}
