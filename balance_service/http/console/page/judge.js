// What a status says about each read model and each partition, in the words of the API and of the runbook.

// From worst to best; each names its section of the runbook.
const HALTED = { rank: 6, kind: "bad", word: "HALTED", section: "BalanceTaskHalted" };
const UNOWNED = { rank: 5, kind: "bad", word: "no owner", section: "BalancePartitionUnanswered" };
const RESTORING = { rank: 4, kind: "bad", word: "RESTORING", section: "BalanceRestoring" };
const STANDS = { rank: 4, kind: "bad", word: "stands still", section: "BalanceFoldingStopped" };
const WAITING = { rank: 3, kind: "warn", word: "WAITING", section: "BalanceTaskWaiting" };
const STOPPED = { rank: 3, kind: "warn", word: "not folded", section: "BalanceStreamFailing" };
const LAGS = { rank: 2, kind: "warn", word: "behind", section: "BalanceLagGrowing" };
const NEEDS = { rank: 1, kind: "warn", word: "serves", section: "BalanceDeadLettersWaiting" };
const SERVES = { rank: 0, kind: "ok", word: "serves", section: "" };
const LAG_SECONDS = 60;
// What a generation is for that does not serve.
const SILENT = ["building", "ready", "kept"];

const JUDGED = { HALTED, RESTORING, CREATED: RESTORING, WAITING, RUNNING: SERVES, CLOSED: UNOWNED };

// All tasks of all instances: those of this instance exactly, the others as they published themselves.
export function tasksOf(status) {
  const own = status.tasks ?? [];
  return (status.applicationServers ?? []).flatMap((server) => {
    const isOwn = server.applicationServer === status.applicationServer;
    return (isOwn ? own : server.tasks).map((task) => ({ ...task, server }));
  });
}

// The stage of a task, such as `balance` of `balance_0`.
const stageOf = ({ task }) => task.slice(0, task.lastIndexOf("_"));

// The tasks of a read model's last stage have the position of its answers.
const isLast = (task) => stageOf(task) === task.readModel;

// The name of the last stage of a read model in one of its generations.
export const stageName = (model, generation) => (generation === 1 ? model : `${model}.g${generation}`);

function modelAndGeneration(name) {
  const [, model, generation] = /^(.+)\.g(\d+)$/.exec(name) ?? [name, name, "1"];
  return { model, generation: Number(generation) };
}

function ownerOf(tasks) {
  const active = tasks.filter((task) => task.role === "active" && !task.server.suspect);
  return active.sort((one, other) => other.epoch - one.epoch)[0] ?? null;
}

// The owners of the partitions of each read model's last stage, in all generations.
export function owners(status) {
  const silent = new Set((status.models ?? []).filter((one) => SILENT.includes(one.status)).map((one) => one.name));
  const byTask = Map.groupBy(tasksOf(status).filter(isLast), (task) => task.task);
  return [...byTask.values()]
    .map(ownerOf)
    .filter(Boolean)
    .map((task) => ({ ...task, stage: task.readModel, serves: !silent.has(task.readModel) }));
}

// One partition of a stage: `{ id, stage, partition, owner, tasks, verdict, reason }`.
function partitionOf(id, tasks, problems) {
  const owner = ownerOf(tasks);
  const at = id.lastIndexOf("_");
  const found = { id, stage: id.slice(0, at), partition: Number(id.slice(at + 1)), owner, tasks };
  const ofStage = problems.filter((one) => one.startsWith(`${found.stage}: `)).map((one) => one.slice(found.stage.length + 2));
  // A problem that names a task is not one of the other partitions.
  const problem = ofStage.find((one) => one.startsWith(`${id} `) || !one.startsWith(`${found.stage}_`)) ?? "";
  let verdict = owner ? JUDGED[owner.state] : UNOWNED;
  let reason = owner?.reason ?? "no instance folds it or answers for it";
  // A task that runs has a reason only if it stands still.
  if (verdict === SERVES && reason) verdict = STANDS;
  if (verdict === SERVES && problem) [verdict, reason] = [STOPPED, problem];
  if (verdict === SERVES && owner.lagSeconds >= LAG_SECONDS) [verdict, reason] = [LAGS, ""];
  return { ...found, verdict, reason };
}

// The read models, worst first, then in the order of their names. Each is judged by the generation that serves.
export function modelsOf(status) {
  const all = tasksOf(status);
  const byTask = Map.groupBy(all, (task) => task.task);
  const partitionsOf = (stages, last) => {
    const ids = new Set([...byTask.keys(), ...(status.unhosted ?? [])].filter((task) => stages.has(stageOf({ task }))));
    for (let p = 0; p < (last.partitions ?? 0); p++) ids.add(`${last.name}_${p}`);
    const partitions = [...ids].map((id) => partitionOf(id, byTask.get(id) ?? [], status.problems ?? []));
    return partitions.sort((one, other) => compare(one.stage, other.stage) || one.partition - other.partition);
  };
  const models = [...Map.groupBy(lastStages(status, all), ({ model }) => model)].sort(([one], [other]) => compare(one, other));
  return models
    .map(([name, generations]) => {
      const serving = generations.find(({ status }) => status === "serving") ?? generations[0];
      const earlier = all.filter((task) => task.readModel === name && !isLast(task)).map(stageOf);
      const others = generations
        .filter((one) => one !== serving)
        .map((one) => generationOf(one, partitionsOf(new Set([one.name]), one)));
      const hosts = (status.applicationServers ?? []).filter(
        (server) => !server.suspect && server.models.some((stage) => modelAndGeneration(stage).model === name),
      );
      return modelOf(serving, partitionsOf(new Set([serving.name, ...earlier]), serving), others, hosts);
    })
    .sort((one, other) => other.verdict.rank - one.verdict.rank);
}

// The last stage of each read model in each of its generations. This instance knows which of those that it hosts serves.
function lastStages(status, all) {
  const hosted = (status.models ?? []).map((stage) => ({ ...modelAndGeneration(stage.name), ...stage, isHosted: true }));
  const here = new Set(hosted.map(({ name }) => modelAndGeneration(name).model));
  const published = [...(status.applicationServers ?? []).flatMap((server) => server.models), ...all.filter(isLast).map(stageOf)];
  const elsewhere = [...new Set(published)].map((name) => ({ ...modelAndGeneration(name), name }));
  const found = [...hosted, ...elsewhere.filter(({ model }) => !here.has(model))];
  return found.sort((one, other) => one.generation - other.generation);
}

// A generation that does not serve.
function generationOf({ name, generation, status }, partitions) {
  const position = known(partitions, (task) => Math.max(0, task.position), sum);
  const lag = known(partitions, (task) => task.lag, sum);
  return {
    stage: name,
    generation,
    status: status ?? "",
    partitions: partitions.map((one) => ({ ...one, status: status ?? "" })),
    // It restores and lags without harm to answers.
    problems: partitions.filter((one) => [HALTED, STANDS, WAITING, STOPPED].includes(one.verdict)),
    lag,
    part: applied(position, lag),
  };
}

// The part of the records that is applied; null while it is unknown.
export const applied = (position, lag) => (position === null || lag === null ? null : position + lag ? position / (position + lag) : 1);

const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);

function modelOf({ name: stage, model: name, standbyReplicas, isHosted }, partitions, others, hosts) {
  const owned = partitions.filter((one) => one.owner);
  const letters = owned.flatMap((one) => one.owner.deadLetters);
  const needs = sum(letters.filter((one) => one.needsDecision).map((one) => one.count));
  const worst = partitions.reduce((one, other) => (other.verdict.rank > one.verdict.rank ? other : one), {
    verdict: needs ? NEEDS : SERVES,
  });
  // Records between two stages count in the lag of each.
  const last = partitions.filter((one) => one.stage === stage);
  const standbys = last.flatMap((one) => one.tasks.filter((task) => task.role === "standby" && !task.server.suspect));
  const restoring = partitions.filter((one) => one.verdict === RESTORING && one.owner.toRestore);
  return {
    name,
    stage,
    isHosted: isHosted ?? false,
    partitions,
    others,
    verdict: worst.verdict,
    problems: partitions.filter((one) => one.verdict.rank > NEEDS.rank),
    answers: last.length > 0 && last.every(hasAnswer),
    // All stages have dead letters.
    listsLetters: partitions.length > 0 && partitions.every(hasAnswer),
    lag: known(partitions, (task) => task.lag, sum),
    lagSeconds: known(partitions, (task) => task.lagSeconds, (all) => Math.max(0, ...all)),
    lagSecondsIsLeast: owned.some((one) => one.owner.lagSecondsIsLeast),
    heals: sum(letters.filter((one) => !one.needsDecision).map((one) => one.count)),
    needs,
    lettersAreKnown: owned.length === partitions.length,
    letters,
    owned: ownedBy(hosts, last),
    standbys: {
      ready: standbys.filter((task) => task.state === "TAILING").length,
      wanted: isHosted ? standbyReplicas * last.length : null,
    },
    restore: restoring.length
      ? {
          part: sum(restoring.map((one) => one.owner.restored)) / sum(restoring.map((one) => one.owner.toRestore)),
          secondsLeft: restoring.every((one) => one.owner.secondsLeft !== null)
            ? Math.max(...restoring.map((one) => one.owner.secondsLeft))
            : null,
        }
      : null,
  };
}

// The fewest and the most partitions that one instance owns; null without instances.
function ownedBy(hosts, partitions) {
  const counts = hosts.map(
    ({ applicationServer }) => partitions.filter(({ owner }) => owner?.server.applicationServer === applicationServer).length,
  );
  return counts.length ? { fewest: Math.min(...counts), most: Math.max(...counts) } : null;
}

// Whether queries for a partition are answered.
export const hasAnswer = ({ owner }) => owner !== null && ["RUNNING", "WAITING"].includes(owner.state);

// Its answers are outdated, and become more so.
export const standsStill = ({ verdict }) => verdict === STANDS;

// A figure of all partitions; null if it is unknown of one.
function known(partitions, of, combined) {
  const values = partitions.map((one) => (one.owner ? of(one.owner) : null));
  return values.length === 0 || values.includes(null) ? null : combined(values);
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
