// The tabs: one panel is open. The address of the page names it, so that a reload and a link lead to the same one.

import { byId } from "./dom.js";
import { choose, chosen, onChosen } from "./url.js";

const FIRST = "overview";

const watchers = new Set();
let opened = "";

export const isOpen = (panel) => panel === opened;

// Calls back when a panel has been opened: only what is seen is asked for.
export function onOpen(callback) {
  watchers.add(callback);
}

export function start() {
  for (const link of document.querySelectorAll("nav a")) {
    link.onclick = (event) => {
      event.preventDefault();
      choose({ at: link.dataset.panel });
      open();
      focus();
    };
  }
  byId("skip").onclick = (event) => {
    event.preventDefault();
    focus();
  };
  onChosen(() => {
    const before = opened;
    open();
    if (opened !== before) focus();
  });
  open();
}

function open() {
  const panels = [...document.querySelectorAll("main > section")];
  const wanted = panels.some(({ id }) => id === chosen("at")) ? chosen("at") : FIRST;
  for (const panel of panels) panel.hidden = panel.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.panel === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted === opened) return;
  opened = wanted;
  for (const callback of watchers) callback();
}

const focus = () => byId(opened).querySelector("h2").focus();
