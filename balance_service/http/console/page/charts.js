// Small charts of the last minutes, each with its number. What this instance measures itself comes from `/metrics`.

import { ask } from "./api.js";
import { byId, h, show, svg, trouble } from "./dom.js";
import { duration, rate, UNKNOWN } from "./format.js";
import { history, live } from "./live.js";
import { isOpen } from "./tabs.js";

const EVERY_MS = 5000;
const KEPT_MS = 300_000;
const WIDTH = 280;
const HEIGHT = 56;
const COMMITS = "balance_batch_duration_seconds_bucket";
const QUERIES = "balance_query_duration_seconds_bucket";

let isAsking = false;
let askedAt = 0;
let before = null;
let measured = [];
let error = null;

// Starts over with another token.
export function forget() {
  askedAt = 0;
  before = null;
  measured = [];
}

export function showCharts() {
  if (!isOpen("charts")) return;
  if (live.state === "live" && Date.now() - askedAt >= EVERY_MS) measure();
  const seen = history();
  const line = (name, of) => ({ name, points: seen.map((one) => [one.at, of(one)]) });
  const quantiles = (of) => [
    { name: "p50", points: measured.map((one) => [one.at, one[of].p50]) },
    { name: "p99", points: measured.map((one) => [one.at, one[of].p99]) },
  ];
  show(
    byId("charts-figures"),
    chart("Records applied", "by all instances", [line("now", (one) => one.rate)], rate),
    chart("Lag of the furthest behind", "age of the oldest record not applied", [line("now", (one) => one.lagSeconds)], duration),
    chart("Commit latency", "of this instance", quantiles("commits"), duration),
    chart("Query latency", "of queries for one key at this instance", quantiles("queries"), duration),
  );
  show(byId("charts-problem"), error ? trouble(error) : "");
}

async function measure() {
  if (isAsking) return;
  isAsking = true;
  askedAt = Date.now();
  try {
    const { text } = await ask("metrics");
    const now = { [COMMITS]: bucketsOf(text, COMMITS), [QUERIES]: bucketsOf(text, QUERIES) };
    const at = Date.now();
    if (before) {
      const since = (name) => quantilesOf(now[name], before[name]);
      measured = measured.filter((one) => at - one.at < KEPT_MS);
      measured.push({ at, commits: since(COMMITS), queries: since(QUERIES) });
    }
    before = now;
    error = null;
  } catch (failure) {
    error = failure;
  } finally {
    isAsking = false;
  }
}

// The cumulative counts of a histogram by upper bound, over all its labels.
function bucketsOf(text, name) {
  const buckets = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(`${name}{`)) continue;
    const bound = /le="([^"]+)"/.exec(line)[1];
    const key = bound === "+Inf" ? Infinity : Number(bound);
    buckets.set(key, (buckets.get(key) ?? 0) + Number(line.slice(line.lastIndexOf(" "))));
  }
  return buckets;
}

// The quantiles of what was counted in between, interpolated within a bucket; null if nothing was.
function quantilesOf(now, earlier) {
  const bounds = [...now.keys()].sort((one, other) => one - other);
  const counts = bounds.map((bound) => now.get(bound) - (earlier.get(bound) ?? 0));
  const all = counts.at(-1) ?? 0;
  const of = (part) => {
    if (all <= 0) return null;
    const at = counts.findIndex((one) => one >= part * all);
    const lower = at ? bounds[at - 1] : 0;
    if (bounds[at] === Infinity) return lower;
    const below = at ? counts[at - 1] : 0;
    return lower + ((bounds[at] - lower) * (part * all - below)) / (counts[at] - below || 1);
  };
  return { p50: of(0.5), p99: of(0.99) };
}

function chart(title, of, lines, said) {
  const known = lines.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value !== null);
  const greatest = Math.max(...known, 0);
  const last = ({ points }) => points.at(-1)?.[1] ?? null;
  const now = lines.map((line) => `${lines.length > 1 ? `${line.name} ` : ""}${last(line) === null ? UNKNOWN : said(last(line))}`).join(" · ");
  const label = `${title}, ${of}: now ${now}; greatest of the last 5 minutes ${known.length ? said(greatest) : UNKNOWN}`;
  return h(
    "figure",
    { "data-key": title },
    h("figcaption", {}, h("strong", {}, title), h("span", { class: "note" }, of), h("span", { class: "now" }, now)),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
      svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1, class: "axis" }),
      lines.map((line, n) => svg("path", { d: pathOf(line.points, greatest), class: `line line-${n}` })),
    ),
    h("span", { class: "note" }, `last 5 minutes; greatest ${known.length ? said(greatest) : UNKNOWN}`),
  );
}

// Gaps of the line are times without a value.
function pathOf(points, greatest) {
  const end = Date.now();
  let isDrawing = false;
  return points
    .map(([at, value]) => {
      if (value === null) {
        isDrawing = false;
        return "";
      }
      const x = WIDTH * (1 - (end - at) / KEPT_MS);
      const y = HEIGHT - 2 - (greatest ? ((HEIGHT - 6) * value) / greatest : 0);
      const step = `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      isDrawing = true;
      return step;
    })
    .join("");
}
