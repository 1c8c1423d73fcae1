// The place on the page: a reload and a link lead to the same one.

import { byId } from "./dom.js";
import { live } from "./live.js";
import { choose, chosen, onChosen } from "./url.js";

const SETTLED_MS = 300;

// Panels above may still grow after a reload.
const RESTORED_MS = 3000;

let restoredAt = 0;
let isMoved = false;
let settling = 0;

export function start() {
  history.scrollRestoration = "manual";
  for (const link of document.querySelectorAll("a[data-panel]")) {
    link.onclick = (event) => {
      event.preventDefault();
      choose({ at: link.dataset.panel });
      goTo(link.dataset.panel);
    };
  }
  onChosen(() => goTo(chosen("at")));
  for (const event of ["wheel", "touchmove", "keydown", "pointerdown"]) addEventListener(event, () => (isMoved = true));
  addEventListener("scroll", () => {
    clearTimeout(settling);
    settling = setTimeout(remember, SETTLED_MS);
  });
}

// Returns to the place of before the reload, once the panels have their content, unless the reader has moved.
export function keep() {
  if (!live.status || isMoved) return;
  restoredAt ||= Date.now();
  if (Date.now() - restoredAt > RESTORED_MS) return;
  if (history.state?.y !== undefined) scrollTo(0, history.state.y);
  else byId(chosen("at"))?.scrollIntoView();
}

function goTo(panel) {
  const section = panel && byId(panel);
  if (!section) return;
  section.scrollIntoView();
  section.querySelector("h2").focus({ preventScroll: true });
}

function remember() {
  if (!isMoved && Date.now() - restoredAt < RESTORED_MS + SETTLED_MS) return;
  const top = [...document.querySelectorAll("main > section")].findLast((one) => one.getBoundingClientRect().top < innerHeight / 3);
  choose({ at: scrollY > 0 ? (top?.id ?? "") : "" });
  history.replaceState({ y: scrollY }, "");
}
