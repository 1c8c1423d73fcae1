// Asks for a token if the API demands one. It stays in the memory of this page: a reload asks again.

import { hasToken, onTokenNeeded, setToken } from "./api.js";
import { byId, show } from "./dom.js";
import { reconnect } from "./live.js";

const renewed = new Set();

// Calls back when the reader has given another token.
export function onToken(callback) {
  renewed.add(callback);
}

export function start() {
  const form = byId("token");
  const field = byId("token-field");
  onTokenNeeded((detail) => {
    form.hidden = false;
    show(byId("token-why"), hasToken() ? `The token was not accepted: ${detail}.` : "This instance demands a token.");
  });
  form.onsubmit = (event) => {
    event.preventDefault();
    setToken(field.value.trim());
    field.value = "";
    form.hidden = true;
    byId("token-forget").hidden = false;
    changed();
  };
  byId("token-forget").onclick = () => {
    setToken("");
    byId("token-forget").hidden = true;
    changed();
  };
}

function changed() {
  reconnect();
  for (const callback of renewed) callback();
}
