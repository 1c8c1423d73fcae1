// What a status says about each read model and each partition. What is wrong, and why, it says itself: `causes`.

const KINDS = { now: "bad", soon: "warn", none: "info" };
const RANKS = { now: 4, soon: 3, none: 2 };
const WORDS = { broker: "no broker", silent: "changes owner", unowned: "no owner" };

// The mark of a cause: its colour.
export const kindOf = (cause) => KINDS[cause.urgency];

// All tasks of all instances: those of this instance exactly, the others as they published themselves.
export function tasksOf(status) {
  const here = status.applicationServer;
  return (status.applicationServers ?? []).flatMap((server) => {
    if (server.applicationServer !== here) return server.tasks.map((task) => ({ ...task, server }));
    // Without a broker, an instance does not hear itself either.
    return (status.tasks ?? []).map((task) => ({ ...task, server: { ...server, suspect: false } }));
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
  const silent = new Set((status.models ?? []).filter((one) => one.status !== "serving").map((one) => one.name));
  const byTask = Map.groupBy(tasksOf(status).filter(isLast), (task) => task.task);
  return [...byTask.values()]
    .map(ownerOf)
    .filter(Boolean)
    .map((task) => ({ ...task, stage: task.readModel, serves: !silent.has(task.readModel) }));
}

// One partition of a stage: `{ id, stage, partition, owner, tasks, cause }`; `cause` is null if nothing is wrong.
function partitionOf(id, tasks, causes) {
  const at = id.lastIndexOf("_");
  const cause = causes.find((one) => one.tasks.includes(id)) ?? null;
  return { id, stage: id.slice(0, at), partition: Number(id.slice(at + 1)), owner: ownerOf(tasks), tasks, cause };
}

// The read models, worst first, then in the order of their names. Each is judged by the generation that serves.
export function modelsOf(status) {
  const all = tasksOf(status);
  const byTask = Map.groupBy(all, (task) => task.task);
  const partitionsOf = (stages, last) => {
    const ids = new Set([...byTask.keys(), ...(status.unhosted ?? [])].filter((task) => stages.has(stageOf({ task }))));
    for (let p = 0; p < (last.partitions ?? 0); p++) ids.add(`${last.name}_${p}`);
    const partitions = [...ids].map((id) => partitionOf(id, byTask.get(id) ?? [], status.causes));
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
  // Records between two stages count in the lag of each.
  const last = partitions.filter((one) => one.stage === stage);
  const standbys = last.flatMap((one) => one.tasks.filter((task) => task.role === "standby" && !task.server.suspect));
  const restoring = partitions.filter((one) => one.owner?.state === "RESTORING" && one.owner.toRestore);
  return {
    name,
    stage,
    isHosted: isHosted ?? false,
    partitions,
    others,
    verdict: verdictOf(partitions, needs),
    answers: last.length > 0 && last.every(hasAnswer),
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

// `{ rank, kind, word, cause, partitions }`: of the worst that any partition has, and which have it.
function verdictOf(partitions, needs) {
  const [worst] = partitions.filter((one) => one.cause).sort((one, other) => RANKS[other.cause.urgency] - RANKS[one.cause.urgency]);
  if (!worst) return { rank: needs ? 1 : 0, kind: needs ? "warn" : "ok", word: "serves", cause: null, partitions: [] };
  const { cause } = worst;
  const concerned = partitions.filter((one) => one.cause === cause).map((one) => one.partition);
  const word = WORDS[cause.kind] ?? cause.kind.replaceAll("-", " ");
  return { rank: RANKS[cause.urgency], kind: kindOf(cause), word, cause, partitions: concerned };
}

// The fewest and the most partitions that one instance owns; null without instances.
function ownedBy(hosts, partitions) {
  const counts = hosts.map(
    ({ applicationServer }) => partitions.filter(({ owner }) => owner?.server.applicationServer === applicationServer).length,
  );
  return counts.length ? { fewest: Math.min(...counts), most: Math.max(...counts) } : null;
}

// Whether queries for a partition are answered.
const hasAnswer = ({ owner }) => owner?.answers ?? false;

// Why nobody answers now for the partition of a position, such as `1:42`, of a read model; empty if somebody does.
export function troubleOf(status, model, position) {
  const partition = Number(position.split(":")[0] || NaN);
  const serving = modelsOf(status).find(({ name }) => name === model);
  const found = serving?.partitions.find((one) => one.stage === serving.stage && one.partition === partition);
  if (!found || hasAnswer(found)) return "";
  return `${found.cause?.what ?? `${found.id} has no owner`}.`;
}

// A figure of all partitions; null if it is unknown of one.
function known(partitions, of, combined) {
  const values = partitions.map((one) => (one.owner ? of(one.owner) : null));
  return values.length === 0 || values.includes(null) ? null : combined(values);
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
