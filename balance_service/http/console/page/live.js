// Follows the status of the instance, and remembers the last minutes of it for rates and charts.

import { events, pause, Refusal } from "./api.js";
import { owners } from "./judge.js";

const KEPT_SECONDS = 300;
const RATE_SECONDS = 5;
const RETRY_MS = 1000;

// `state`: "connecting", "live", "lost" (with `problem`), "refused" (with `problem`) or "paused".
export const live = { state: "connecting", problem: "", status: null, at: null, lostAt: null };

const watchers = new Set();
let aborting = new AbortController();
let wake = () => {};
let isPaused = false;
let positions = new Map();
const applied = new Map();
let samples = [];

// Calls back on each change, and once a second because ages grow.
export function onLive(callback) {
  watchers.add(callback);
}

export function setPaused(paused) {
  isPaused = paused;
  interrupt();
}

// Connects again, for example with another token.
export function reconnect() {
  interrupt();
}

// Records that a read model's last stage applied a second, lately: from the positions of its owners. Null while unknown.
export function rateOf(stage) {
  const last = samples.at(-1);
  const since = samples.filter(({ applied }) => applied.has(stage));
  const first = since.findLast((sample) => last.at - sample.at >= RATE_SECONDS * 1000) ?? since[0];
  return rateBetween(first, last, (sample) => sample.applied.get(stage));
}

// The time until that stage has applied a number of records; null while it is unknown.
export function secondsLeft(stage, lag) {
  const rate = live.state === "live" ? rateOf(stage) : null;
  return lag === 0 ? 0 : lag !== null && rate ? lag / rate : null;
}

// The seconds of the last minutes, oldest first: `{ at, rate, lagSeconds }` of all read models together.
export function history() {
  const total = ({ applied }) => (applied.size ? [...applied.values()].reduce((sum, one) => sum + one, 0) : undefined);
  return samples.map((sample, n) => ({
    at: sample.at,
    lagSeconds: sample.lagSeconds,
    rate: rateBetween(samples[Math.max(0, n - RATE_SECONDS)], sample, total),
  }));
}

function rateBetween(first, last, of) {
  if (!first || !last || last.at === first.at) return null;
  const [from, to] = [of(first), of(last)];
  return from === undefined || to === undefined ? null : Math.max(0, to - from) / ((last.at - first.at) / 1000);
}

export function start() {
  document.addEventListener("visibilitychange", interrupt);
  setInterval(tick, 1000);
  follow();
}

function interrupt() {
  aborting.abort();
  wake();
}

async function follow() {
  for (;;) {
    if (isPaused || document.hidden) {
      become(isPaused ? "paused" : "connecting");
      await woken();
      continue;
    }
    aborting = new AbortController();
    const { signal } = aborting;
    try {
      for await (const event of events("api/status", { signal })) {
        if (event.event === "status") take(JSON.parse(event.data));
        become("live");
      }
      become("lost", "The connection ended.");
    } catch (error) {
      if (signal.aborted) continue;
      if (error instanceof Refusal && [401, 403].includes(error.status)) {
        become("refused", error.status === 401 ? "" : error.message);
        await woken();
        continue;
      }
      become("lost", error instanceof Refusal ? error.message : "This instance does not answer.");
    }
    await Promise.race([pause(RETRY_MS), woken()]);
  }
}

const woken = () => new Promise((resolve) => (wake = resolve));

function become(state, problem = "") {
  if (state === "lost" && live.state !== "lost") live.lostAt = new Date();
  if (state === live.state && problem === live.problem) return;
  Object.assign(live, { state, problem });
  tell();
}

function take(status) {
  live.status = status;
  live.at = new Date();
  const now = new Map();
  for (const { stage, task, position, epoch } of owners(status)) {
    const before = positions.get(task);
    const gained = before && before.epoch <= epoch && before.position >= 0 ? Math.max(0, position - before.position) : 0;
    applied.set(stage, (applied.get(stage) ?? 0) + gained);
    now.set(task, { position, epoch });
  }
  positions = now;
  tell();
}

function tick() {
  if (live.state === "live") sample();
  tell();
}

function sample() {
  const at = Date.now();
  const lags = owners(live.status ?? {}).filter((task) => task.serves).map((task) => task.lagSeconds);
  const lagSeconds = lags.length && !lags.includes(null) ? Math.max(...lags) : null;
  samples = samples.filter((one) => at - one.at < KEPT_SECONDS * 1000);
  samples.push({ at, applied: new Map(applied), lagSeconds });
}

function tell() {
  for (const callback of watchers) callback(live);
}
