// What happened: an axis of time, and each interruption with its culprit, its evidence and the seconds of its phases.

import { h } from './dom.js';
import { phasesOf, secondsOf } from './model.js';
import { CAUSE_WORDS, PHASES, PHASE_WORDS, RUNG_WORDS, clock, duration, many, moment } from './words.js';

const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const MAX_TICKS = 7;
const MIN_SPAN_S = 30;
/** Characters of the detail of a fault that is not the culprit's, as `unbroken_core` keeps them. */
const MAX_OTHER = 300;

/** Which recoveries a person has opened or closed, by key; of all others the newest is open. */
const chosen = new Map();

/** The axis and the list, newest first. */
export function timeline(view, now, again) {
  const { recoveries } = view;
  return h(
    'section', { class: 'panel timeline', key: 'timeline', 'aria-labelledby': 'what' },
    h('div', { class: 'title' }, h('h2', { id: 'what' }, 'What happened'), key(recoveries)),
    axis(view, now),
    recoveries.length === 0 ? h('p', { class: 'soft' }, 'No interruption so far.') : h('ol', { class: 'recoveries' }, recoveries.map((one, index) => item(one, index === 0, view, now, again))),
  );
}

function key(recoveries) {
  const used = PHASES.filter((phase) => recoveries.some((one) => phase in one.phase_s));
  return h('ul', { class: 'legend', 'aria-label': 'phases of a recovery' }, used.map((phase) => h('li', { key: phase, title: PHASE_WORDS[phase] }, h('i', { class: `swatch ${phase}`, 'aria-hidden': 'true' }), phase)));
}

function axis(view, now) {
  const starts = view.recoveries.map((one) => Date.parse(one.started_at)).filter(Number.isFinite);
  const from = Math.min(view.since, ...starts, now - MIN_SPAN_S * 1000);
  const place = (ms) => `${(100 * Math.min(Math.max(ms - from, 0), now - from)) / (now - from)}%`;
  const marks = view.recoveries.map((one) => {
    const start = Date.parse(one.started_at);
    const end = one.ended_at ? Date.parse(one.ended_at) : one.isCut ? start : now;
    const style = { left: place(start), width: `${(100 * Math.max(end - start, 0)) / (now - from)}%` };
    return h('i', { key: one.key, class: `mark ${one.ended_at ? '' : 'unfinished'}`, style, title: `${clock(start)}: ${who(one)}, ${one.cause}` });
  });
  const restarts = view.restarts.map(({ at, term }) => h('i', { key: `restart-${term}`, class: 'mark restart', style: { left: place(at) }, title: `${clock(at)}: the rendezvous was restarted` }));
  const words = `${many(view.recoveries.length, 'interruption')} from ${moment(from)} until now`;
  return h(
    'div', { class: 'axis' },
    h('div', { class: `track ${view.state.kind}`, role: 'img', 'aria-label': words }, marks, restarts),
    h('div', { class: 'ticks', 'aria-hidden': 'true' }, ticks(from, now).map((ms) => h('span', { key: ms, class: ms - from < 0.04 * (now - from) ? 'first' : now - ms < 0.04 * (now - from) ? 'last' : '', style: { left: place(ms) } }, clock(ms).slice(0, now - from > 600_000 ? 5 : 8)))),
  );
}

function ticks(from, now) {
  const step = (TICKS.find((seconds) => (now - from) / 1000 / seconds <= MAX_TICKS) ?? Math.ceil((now - from) / 86_400_000 / MAX_TICKS) * 86400) * 1000;
  const found = [];
  for (let ms = Math.ceil(from / step) * step; ms <= now; ms += step) found.push(ms);
  return found;
}

function item(one, isFirst, view, now, again) {
  const isOpen = chosen.get(one.key) ?? isFirst;
  const toggle = (event) => {
    if (event.target.open !== (chosen.get(one.key) ?? isFirst)) {
      chosen.set(one.key, event.target.open);
      again();
    }
  };
  const phases = phasesOf(one, view.status.phase, PHASES);
  return h(
    'li', { key: one.key },
    h(
      'details', { open: isOpen, ontoggle: toggle, class: one.ended_at ? '' : 'unfinished' },
      h(
        'summary', null,
        h('time', { datetime: one.started_at, title: moment(Date.parse(one.started_at)) }, clock(Date.parse(one.started_at))),
        h('span', { class: 'who' }, h('b', null, who(one)), ' ', h('span', { class: 'cause' }, one.cause)),
        h('span', { class: 'took' }, outcome(one, view, now)),
        h('span', { class: 'phases', 'aria-hidden': 'true' }, parts(phases)),
      ),
      isOpen ? evidence(one, phases, view) : null,
    ),
  );
}

function outcome(one, view, now) {
  if (one.ended_at) return duration(secondsOf(one, now));
  if (one.isCut) return 'not seen';
  return view.running === one ? duration(secondsOf(one, now)) : 'not repaired';
}

function parts(phases) {
  const known = phases.filter(([, seconds]) => seconds !== null);
  const total = known.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  return known.map(([phase, seconds]) => h('i', { key: phase, class: phase, style: { width: `${(100 * seconds) / total}%` }, title: `${phase} ${duration(seconds)}` }));
}

function evidence(one, phases, view) {
  const isRunning = view.running === one;
  return h(
    'div', { class: 'evidence' },
    isRunning ? steps(one, view) : null,
    h('p', { class: 'what' }, what(one)),
    stack(one),
    h(
      'dl', null,
      row('culprit', [one.pod && `pod ${one.pod}`, one.node && `node ${one.node}`, one.domain !== one.node && one.domain && `domain ${one.domain}`].filter(Boolean).join(', ') || 'nobody in particular'),
      row('cause', `${one.cause}: ${CAUSE_WORDS[one.cause] ?? 'not known to this page'}`),
      also(one),
      row('repaired by', repair(one)),
      row('iteration', one.iteration_after < 0 ? `${one.iteration_before}` : `${one.iteration_before} \u2192 ${one.iteration_after}${sizes(one)}`),
    ),
    isRunning || phases.length === 0 ? null : h(
      'table', { class: 'seconds' }, h('caption', { class: 'unseen' }, 'seconds of each phase'),
      h('tbody', null, phases.map(([phase, seconds]) => h('tr', { key: phase }, h('th', { scope: 'row' }, h('i', { class: `swatch ${phase}`, 'aria-hidden': 'true' }), phase), h('td', null, duration(seconds)), h('td', { class: 'soft' }, PHASE_WORDS[phase])))),
    ),
  );
}

/** How far a recovery that is under way has come. */
function steps(one, view) {
  const known = new Map(phasesOf(one, view.status.phase, PHASES).map((phase) => [phase[0], phase]));
  return h('ol', { class: 'steps', 'aria-label': 'phases' }, PHASES.map((phase) => {
    const [, seconds, isNow] = known.get(phase) ?? [];
    const note = isNow ? 'now' : seconds === undefined ? '' : duration(seconds);
    return h('li', { key: phase, class: `${phase} ${isNow ? 'now' : note ? 'done' : 'open'}`, 'aria-current': isNow ? 'step' : null, title: PHASE_WORDS[phase] }, h('span', null, phase), h('small', null, note));
  }));
}

function stack(one) {
  if (one.stack.length === 0) return null;
  return h(
    'figure', { class: 'stack' }, h('figcaption', null, one.cause.endsWith('timeout') ? 'Where it stood, innermost first' : 'Where it was raised, innermost first'),
    h('ol', null, one.stack.toReversed().map((frame) => {
      const [, file, line, where] = frame.match(/^(.*):(\d+|\?\?\?) in (.*)$/s) ?? [null, frame, '', ''];
      const cut = file.lastIndexOf('/') + 1;
      return h('li', null, h('code', null, h('b', null, where), where && '  ', h('span', { class: 'soft' }, file.slice(0, cut)), file.slice(cut), line && `:${line}`));
    })),
  );
}

function row(term, text) {
  return [h('dt', null, term), h('dd', null, text)];
}

/** rank 3 in digits-1 */
function who(one) {
  if (one.rank !== null) return `rank ${one.rank}${one.pod ? ` in ${one.pod}` : ''}`;
  return one.pod || 'the job as a whole';
}

function what(one) {
  return one.detail || CAUSE_WORDS[one.cause] || one.cause;
}

/** What else failed in the same recovery; who failed alike is in one text, as `unbroken why` says it. */
function also(one) {
  const others = one.others ?? []; // A rendezvous of an earlier release names none.
  const alike = new Map();
  for (const { rank, pod, cause, detail } of others) {
    const isSame = cause === one.cause && detail === one.detail.split(/\s+/).filter(Boolean).join(' ').slice(0, MAX_OTHER);
    const how = isSame ? 'the same' : `${cause}${detail && ` (${detail})`}`;
    alike.set(how, [...(alike.get(how) ?? []), rank === null ? pod || 'a pod' : `rank ${rank} of ${pod}`]);
  }
  const texts = [...alike].map(([how, failed]) => `${failed.join(', ')}: ${how}`);
  const rest = one.num_faults - 1 - others.length;
  if (rest > 0) texts.push(one.cause.endsWith('timeout') ? `${rest} more that failed or only waited` : many(rest, 'more fault'));
  return texts.length === 0 ? null : row('and', h('ul', null, texts.map((text) => h('li', null, text))));
}

function repair(one) {
  if (one.isCut) return 'its end was not seen: the rendezvous was restarted meanwhile';
  if (one.rung === null) return one.ended_at ? 'nothing' : 'nothing yet';
  const takers = one.replaced_by.length > 0 ? `: ${one.replaced_by.join(', ')}` : '';
  return `${one.rung}: ${RUNG_WORDS[one.rung] ?? ''}${takers}${one.ended_at ? '' : ' (not over)'}`;
}

function sizes(one) {
  if (!one.world_size_after || one.world_size_after === one.world_size_before) return '';
  return `, ${one.world_size_before} \u2192 ${one.world_size_after} ranks`;
}
