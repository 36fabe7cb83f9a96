// From what the rendezvous says to what is shown. Pure: no document, no clock, no network.

import { KINDS, TROUBLE, count as number, many } from './words.js';

const SEVERITY = new Map(KINDS.map((kind, index) => [kind, index]));
const MAX_KEPT = 60;
const LIVE = new Set(['interrupted', 'planned', 'running']);

/** Return what this page remembers beyond one status: where pods were, and what former rendezvous have told. */
export function emptyMemory() {
  return { pods: new Map(), recoveries: new Map(), restarts: [], term: null };
}

/** Return [view, memory]: what to show of an answer of /page/status, and what to remember for the next one. */
export function digest(answer, memory) {
  const { status } = answer;
  const now = Date.parse(answer.now);
  const kept = remember(answer, memory, now);
  const current = status.pods.map((pod) => shownPod(pod, status));
  const pods = [...current, ...lostPods(status, current, kept)];
  const recoveries = [...kept.recoveries.values()].sort((a, b) => b.term - a.term || b.number - a.number);
  const running = recoveries.find((one) => one.term === status.term && !one.ended_at) ?? null;
  const isOver = status.phase === 'failed' || status.phase === 'complete';
  for (const pod of pods) pod.isCulprit = running !== null && pod.name === running.pod;
  return [
    {
      status,
      now,
      since: Date.parse(answer.since),
      state: stateOf(status),
      why: answer.why,
      layers: answer.layers,
      wanted: status.world_size + status.lost_ranks,
      pods,
      tree: treeOf(pods, answer.layers),
      recoveries,
      running: isOver ? null : running,
      restarts: kept.restarts,
    },
    kept,
  ];
}

/** Return {kind, word}: the first thing that a person wants to know. */
export function stateOf(status) {
  const hasRun = status.recoveries.length > 0;
  const states = {
    forming: { kind: 'waiting', word: 'Not training yet' },
    planned: hasRun ? { kind: 'stopping', word: 'Recovering' } : { kind: 'waiting', word: 'Starting' },
    interrupted: { kind: 'stopping', word: 'Recovering' },
    running: { kind: 'training', word: 'Training' },
    ending: { kind: 'waiting', word: 'Ending' },
    complete: { kind: 'complete', word: 'Complete' },
    failed: { kind: 'lost', word: 'Failed' },
  };
  return states[status.phase] ?? { kind: 'unheard', word: status.phase };
}

/** Return {step, notes, isWarning}: what is safe of a job with checkpoints in memory; null for a job without them. */
export function safetyOf(status) {
  const memory = status.memory ?? null;
  if (memory === null) return null;
  const { across = '', source = '', disk_every: diskEvery = 0, disk_step: diskStep = -1, disk_problem: diskProblem = '' } = memory;
  const step = memory.complete_step;
  const protectedStep = memory.protected_step ?? -1;
  const isAsAsked = across.startsWith('across ');
  const notes = [step < 0 ? 'no checkpoint is on all ranks yet' : `on all ranks, ${ago(step, status.max_step)}`];
  if (across) notes.push(protectedStep < 0 ? `none is protected${isAsAsked ? ' yet, wanted ' : ': '}${across}` : `step ${number(protectedStep)} protected${isAsAsked ? ' ' : ', '}${across}`);
  if (diskEvery > 0) notes.push(`${diskStep < 0 ? 'none' : `step ${number(diskStep)}`} on the disk${diskProblem ? `: ${diskProblem}` : ''}`);
  if (source === 'memory' || source === 'disk') notes.push(`restored last: step ${number(memory.restored_step)} from ${source}, ${redone(memory)}`);
  if (source === 'nothing' && memory.steps_redone > 0) notes.push(`nothing was restored, ${redone(memory)}`);
  if (memory.reason) notes.push(memory.reason);
  return { step, notes, isWarning: step < 0 || (across !== '' && protectedStep < 0) || diskProblem !== '' };
}

function redone(memory) {
  if (memory.is_redone_least && !memory.steps_redone) return 'how many steps are redone is not known';
  return `${memory.is_redone_least ? 'at least ' : ''}${many(memory.steps_redone, 'step')} redone`;
}

function ago(step, maxStep) {
  return maxStep > step ? `${many(maxStep - step, 'step')} ago` : 'the newest step';
}

function remember(answer, memory, now) {
  const { status } = answer;
  const isRestarted = memory.term !== null && memory.term !== status.term;
  const restarts = isRestarted ? [...memory.restarts, { at: now, term: status.term }].slice(-MAX_KEPT) : memory.restarts;
  const recoveries = new Map(memory.recoveries);
  for (const one of status.recoveries) {
    const key = `${status.term}.${one.number}`;
    recoveries.set(key, { ...one, key, term: status.term, isCut: false });
  }
  for (const [key, one] of recoveries) {
    if (one.term !== status.term && !one.ended_at) recoveries.set(key, { ...one, isCut: true });
  }
  for (const key of [...recoveries.keys()].slice(0, -MAX_KEPT)) recoveries.delete(key);
  return { pods: placesOf(status, memory.pods), recoveries, restarts, term: status.term };
}

/** Pods with ranks as they were last seen; those that went are kept for as long as somebody lacks their ranks. */
function placesOf(status, former) {
  const held = new Set(status.pods.flatMap((pod) => pod.ranks));
  const places = new Map();
  for (const [uid, pod] of former) {
    if (LIVE.has(status.phase) && pod.ranks.some((rank) => rank < status.world_size && !held.has(rank))) places.set(uid, pod);
  }
  for (const pod of status.pods) if (pod.ranks.length > 0) places.set(pod.uid, pod);
  return places;
}

function shownPod(pod, status) {
  const isWhole = pod.ranks.length === pod.workers.length;
  const cells = pod.workers.map((phase, index) => ({
    kind: pod.is_connected ? kindOf(phase, pod, status) : 'unheard',
    rank: isWhole ? pod.ranks[index] : null,
  }));
  const kind = cells.reduce((worst, cell) => (SEVERITY.get(cell.kind) < SEVERITY.get(worst) ? cell.kind : worst), 'complete');
  const { uid, node, role, domains, ranks } = pod;
  return { uid, name: pod.pod, node, role, domains, ranks, cells, kind: cells.length > 0 ? kind : 'starting' };
}

function kindOf(phase, pod, status) {
  if (phase !== 'ready') {
    return { starting: 'starting', running: 'training', stopping: 'stopping', completed: 'complete', gone: 'ended' }[phase] ?? 'unheard';
  }
  // Before the first plan nobody is a spare yet.
  return pod.ranks.length > 0 || status.iteration < 0 ? 'waiting' : 'spare';
}

/** Return a pod for each place whose ranks nobody has: as remembered, or where the culprit of the recovery was. */
function lostPods(status, current, memory) {
  if (!LIVE.has(status.phase)) return [];
  const held = new Set(current.flatMap((pod) => pod.ranks));
  const missing = new Set();
  for (let rank = 0; rank < status.world_size; rank += 1) if (!held.has(rank)) missing.add(rank);
  const present = new Set(current.map((pod) => pod.uid));
  const found = [];
  for (const [uid, pod] of memory.pods) {
    if (present.has(uid)) continue;
    const ranks = pod.ranks.filter((rank) => missing.delete(rank));
    if (ranks.length > 0) found.push(lostPod(uid, pod.pod, pod.node, pod.domains, ranks));
  }
  if (missing.size === 0) return found;
  const running = status.recoveries.findLast((one) => !one.ended_at);
  const neighbour = running && current.find((pod) => pod.domains.length > 0 && pod.domains.at(-1) === running.domain);
  const name = running && missing.has(running.rank) ? running.pod : 'not known';
  found.push(lostPod('lost', name, running?.node ?? '', neighbour ? neighbour.domains : [], [...missing]));
  return found;
}

function lostPod(uid, name, node, domains, ranks) {
  return { uid, name, node, role: 'active', domains, ranks, cells: ranks.map((rank) => ({ kind: 'lost', rank })), kind: 'lost' };
}

function newDomain(id, layer, name) {
  return { id, layer, name, children: [], byName: new Map(), pods: [], numPods: 0, counts: {}, troubles: 0 };
}

/** Return the domains as a tree, in the order in which their pods come; the root is the job. */
export function treeOf(pods, layers) {
  const root = newDomain('', '', '');
  for (const pod of pods) {
    let place = root;
    count(place, pod);
    for (const [depth, domain] of pod.domains.entries()) {
      if (!place.byName.has(domain)) {
        const child = newDomain(JSON.stringify(pod.domains.slice(0, depth + 1)), layers[depth] ?? '', domain || 'not known');
        place.byName.set(domain, child);
        place.children.push(child);
      }
      place = place.byName.get(domain);
      count(place, pod);
    }
    place.pods.push(pod);
  }
  return root;
}

function count(domain, pod) {
  domain.numPods += 1;
  for (const cell of pod.cells) {
    domain.counts[cell.kind] = (domain.counts[cell.kind] ?? 0) + 1;
    if (TROUBLE.has(cell.kind)) domain.troubles += 1;
  }
}

/** Return [phase, seconds or null, isNow] for each phase of a recovery that is known or under way. */
export function phasesOf(recovery, jobPhase, phases) {
  const current = recovery.ended_at || recovery.isCut ? null : { interrupted: 'stop', planned: 'enter', running: 'first-progress' }[jobPhase];
  return phases
    .map((phase) => [phase, recovery.phase_s[phase] ?? null, phase === current])
    .filter(([, seconds, isNow]) => seconds !== null || isNow);
}

/** Seconds of a recovery: of its phases when it is over, else since it began. */
export function secondsOf(recovery, now) {
  if (!recovery.ended_at && !recovery.isCut) return Math.max(now - Date.parse(recovery.started_at), 0) / 1000;
  return Object.values(recovery.phase_s).reduce((sum, seconds) => sum + seconds, 0);
}
