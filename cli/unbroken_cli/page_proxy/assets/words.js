// Numbers, times and the closed vocabulary in plain words. Pure.

export const PHASES = ['detect', 'stop', 'plan', 'enter', 'first-progress'];

export const PHASE_WORDS = {
  detect: 'from the fault to its report',
  stop: 'until the workers that are needed were ready',
  plan: 'cutting and sending the plan',
  enter: 'until every active worker was in the training function again',
  'first-progress': 'until every active worker had made a step',
};

/** What a rank or a pod does, from the worst to the best: the first that one of its workers does names the pod. */
export const KINDS = ['lost', 'ended', 'unheard', 'stopping', 'starting', 'waiting', 'spare', 'training', 'complete'];

export const KIND_WORDS = {
  lost: 'lost',
  ended: 'process ended',
  unheard: 'not heard',
  stopping: 'leaves',
  starting: 'starts',
  waiting: 'ready, waits for the plan',
  spare: 'spare',
  training: 'trains',
  complete: 'complete',
};

/** The same in one word, for counts. */
export const KIND_NAMES = { lost: 'lost', ended: 'ended', unheard: 'not heard', stopping: 'leaving', starting: 'starting', waiting: 'ready', spare: 'spare', training: 'training', complete: 'complete' };

/** Kinds that a person should look at; the others pass by themselves. */
export const TROUBLE = new Set(['lost', 'ended', 'unheard']);

export const CAUSE_WORDS = {
  'capacity-returned': 'no fault: pods were ready for ranks that were missing',
  exception: 'the script raised an exception',
  'base-exception': 'the script left with SystemExit or the like',
  'stale-state': 'torch still held something of the previous rank; a new process took over',
  'log-rule': 'a log rule of the job calls it fatal',
  'soft-timeout': 'no progress; interrupted',
  'hard-timeout': 'no progress; its process was ended',
  unhealthy: 'a health check failed',
  'process-exit': 'the process ended',
  'process-signal': 'a signal ended the process',
  'device-fault': 'a GPU or a link is broken',
  straggler: 'a rank held all others up',
  'pod-leaving': 'the pod was being deleted',
  'pod-lost': 'the pod is gone, or its connection is and did not come back',
  'heartbeat-lost': 'the pod fell silent',
  'node-lost': 'the node is down or gone',
};

export const RUNG_WORDS = {
  'in-process': 'restarted in the same processes',
  process: 'the process was started again',
  pod: 'a spare took over',
  world: 'goes on with fewer ranks',
  job: 'all processes were started again',
};

/** 0.0342 -> '34 ms', 3.42 -> '3.4 s', 200 -> '3 min 20 s', 9000 -> '2 h 30 min'. */
export function duration(seconds) {
  const value = Math.max(seconds, 0);
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  const units = [[86400, 'd', 3600, 'h'], [3600, 'h', 60, 'min'], [60, 'min', 1, 's']];
  const whole = Math.round(value);
  const [size, word, part, partWord] = units.find(([limit]) => whole >= limit);
  return `${Math.floor(whole / size)} ${word} ${Math.floor((whole % size) / part)} ${partWord}`;
}

/** 12345 -> '12,345'. */
export function count(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d))/g, ',');
}

/** [0, 1, 2, 5] -> '0-2, 5'. */
export function ranges(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = parts.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, end]) => (first === end ? `${first}` : `${first}\u2013${end}`)).join(', ');
}

/** Milliseconds -> '14:02:11', UTC as in all logs. */
export function clock(ms) {
  return Number.isFinite(ms) ? new Date(ms).toISOString().slice(11, 19) : '?';
}

/** Milliseconds -> '2026-11-21 14:02:11 UTC'. */
export function moment(ms) {
  return Number.isFinite(ms) ? `${new Date(ms).toISOString().slice(0, 19).replace('T', ' ')} UTC` : 'at an unknown time';
}

/** 'rank', 1 -> '1 rank'. */
export function many(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}
