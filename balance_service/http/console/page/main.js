// Starts the panels, and shows them again when the status has changed.

import * as catalogue from "./catalogue.js";
import * as charts from "./charts.js";
import * as decision from "./decision.js";
import * as flow from "./flow.js";
import * as funds from "./funds.js";
import * as generations from "./generations.js";
import * as keys from "./keys.js";
import * as letters from "./letters.js";
import * as live from "./live.js";
import { showModels } from "./models.js";
import * as partitions from "./partitions.js";
import * as place from "./place.js";
import * as runbook from "./runbook.js";
import * as summary from "./summary.js";
import * as token from "./token.js";

const panels = [
  summary.showSummary,
  catalogue.readCatalogue,
  showModels,
  partitions.showPartitions,
  keys.showKeys,
  letters.showLetters,
  generations.showGenerations,
  charts.showCharts,
  place.keep,
];

for (const part of [runbook, token, summary, partitions, keys, funds, letters, decision, generations, charts, flow, place]) part.start();
token.onToken(() => {
  for (const part of [catalogue, keys, letters, generations, charts, flow]) part.forget();
});
live.onLive(() => {
  for (const panel of panels) panel();
});
live.start();
