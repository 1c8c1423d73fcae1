// Starts the panels, and shows them again when the status has changed.

import * as catalogue from "./catalogue.js";
import * as causes from "./causes.js";
import * as charts from "./charts.js";
import * as decision from "./decision.js";
import * as flow from "./flow.js";
import * as funds from "./funds.js";
import * as generations from "./generations.js";
import * as history from "./history.js";
import * as instances from "./instances.js";
import * as keys from "./keys.js";
import * as letters from "./letters.js";
import * as live from "./live.js";
import { showModels } from "./models.js";
import * as partitions from "./partitions.js";
import * as runbook from "./runbook.js";
import * as tabs from "./tabs.js";
import * as token from "./token.js";

const panels = [
  causes.showCauses,
  catalogue.readCatalogue,
  showModels,
  partitions.showPartitions,
  instances.showInstances,
  keys.showKeys,
  letters.showLetters,
  generations.showGenerations,
  history.showHistory,
  charts.showCharts,
  flow.showFlow,
];
const showAll = () => {
  for (const panel of panels) panel();
};

for (const part of [tabs, runbook, token, causes, partitions, instances, keys, funds, letters, decision, generations, history, flow]) part.start();
token.onToken(() => {
  for (const part of [catalogue, instances, keys, letters, generations, history, charts, flow]) part.forget();
});
live.onLive(showAll);
tabs.onOpen(showAll);
live.start();
