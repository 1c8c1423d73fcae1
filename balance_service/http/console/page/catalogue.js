// The read models as the API lists them, with their keys and fields, and the tables that they join with. They are asked
// for once.

import { askJson, isPassing, pause } from "./api.js";
import { live } from "./live.js";

const RETRY_MS = 2000;
const REFUSED_MS = 60_000;

// `error` is why they are not known.
export const catalogue = { models: [], tables: [], isKnown: false, error: null };

const changed = new Set();
let isAsking = false;

// Calls back when they become known.
export function onCatalogue(callback) {
  changed.add(callback);
}

// Starts over with another token.
export function forget() {
  Object.assign(catalogue, { models: [], tables: [], isKnown: false, error: null });
  isAsking = false;
}

// Asks for them once the instance can answer.
export async function readCatalogue() {
  if (catalogue.isKnown || isAsking || !live.status || live.status.partitions === null || live.state !== "live") return;
  isAsking = true;
  try {
    const [{ models }, { tables }] = await Promise.all([askJson("api/models"), askJson("api/tables")]);
    Object.assign(catalogue, { models: models.filter((model) => model.key !== "" || model.source === ""), tables, isKnown: true, error: null });
    for (const callback of changed) callback();
  } catch (error) {
    catalogue.error = error;
    // Without the scope, only another token changes the answer.
    await pause(isPassing(error) ? RETRY_MS : REFUSED_MS);
  } finally {
    isAsking = false;
  }
}
