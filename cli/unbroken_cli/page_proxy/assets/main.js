// Asks for the status for as long as the page is looked at, and shows it. Reads; changes nothing.

import { h, render } from './dom.js';
import { digest, emptyMemory, safetyOf } from './model.js';
import { timeline } from './timeline.js';
import { topology } from './topology.js';
import { clock, count, many, moment } from './words.js';

const WAIT_S = 5;
const ANSWER_MS = (WAIT_S + 15) * 1000;
const PAUSE_MS = 150;
const RETRY_MS = 1000;
const TICK_MS = 1000;

const place = document.getElementById('page');
const news = document.getElementById('news');
let memory = emptyMemory();
let view = null;
let aheadMs = 0;
/** Why what is shown may be old; null while the rendezvous answers. */
let trouble = 'asking the rendezvous\u2026';
let told = '';

function show() {
  const now = Date.now() + aheadMs;
  render(place, view === null ? [waiting()] : page(now));
  document.title = view === null ? 'Unbroken' : `${trouble ? '? ' : ''}${view.state.word}: ${view.status.job}`;
}

function waiting() {
  return h('p', { class: 'alone' }, trouble);
}

function page(now) {
  return [
    header(),
    h('main', { key: 'main', class: trouble ? 'stale' : '' }, figures(), refused(), h('div', { class: 'columns', key: 'columns' }, topology(view, show), timeline(view, now, show)), why()),
    footer(),
  ];
}

function header() {
  const { state, status } = view;
  return h(
    'header', { key: 'header', class: state.kind },
    h('div', { class: 'line' }, h('h1', null, status.job), h('span', { class: `state ${trouble ? 'unheard' : state.kind}` }, trouble ? `${state.word}?` : state.word), link()),
    h('p', { class: 'message' }, status.message, status.phase === 'running' || !status.reason ? '' : h('span', { class: 'reason' }, ` (${status.reason})`)),
  );
}

function link() {
  if (trouble === null) return h('span', { class: 'link good', key: 'good' }, 'live');
  // Its text stays as it is, so that it is read out once.
  return h('span', { class: 'link bad', key: 'bad', role: 'alert' }, `${trouble}; shown is what was so at ${clock(view.now)} UTC`);
}

function figures() {
  const { status, wanted } = view;
  const { counts } = view.tree;
  const since = clock(view.since).slice(0, 5);
  const training = (counts.training ?? 0) + (counts.complete ?? 0);
  const lost = status.lost_ranks + (counts.lost ?? 0);
  const restarts = Object.values(status.restarts_by_rung).reduce((sum, number) => sum + number, 0);
  const causes = Object.entries(status.restarts_by_cause).sort((a, b) => b[1] - a[1]).map(([cause, number]) => `${number} ${cause}`);
  const perCent = status.ettr === null ? '\u2013' : `${(100 * status.ettr).toFixed(status.ettr >= 0.9995 || status.ettr < 0.1 ? 2 : 1)} %`;
  return h(
    'dl', { class: 'figures', key: 'figures' },
    figure('ranks that train', count(training), training === wanted ? 'all that are wanted' : `of ${count(wanted)} that are wanted`, training === wanted ? '' : 'warn'),
    figure('spare', count(status.spare_ranks), status.broken_spares > 0 ? `${many(status.broken_spares, 'spare pod')} broken up` : status.spare_ranks > 0 ? 'ready to take over' : 'none is ready', status.spare_ranks > 0 ? '' : 'warn'),
    status.iteration < 0 ? figure('lost', '\u2013', 'not started yet') : figure('lost', count(lost), lost > 0 ? 'nobody has these ranks' : 'somebody has each rank', lost > 0 ? 'bad' : ''),
    figure('ETTR', perCent, status.term > 1 ? `of the time since ${since} was progress` : 'of the time was progress'),
    figure('recoveries', count(restarts), causes.length > 0 ? causes.slice(0, 3).join(', ') : `none since ${since}`),
    status.max_step >= 0 ? figure('step', count(status.max_step), `iteration ${status.iteration}`) : figure('iteration', status.iteration < 0 ? '\u2013' : count(status.iteration), 'the script reports no steps'),
    checkpoint(status),
  );
}

function checkpoint(status) {
  const safety = safetyOf(status);
  if (safety === null) return null;
  return figure('checkpoint', safety.step < 0 ? '\u2013' : count(safety.step), safety.notes.join('; '), safety.isWarning ? 'warn' : '');
}

function figure(name, value, note, kind = '') {
  return h('div', { class: `figure ${kind}`, key: name }, h('dt', null, name), h('dd', null, h('b', null, value), h('small', null, note)));
}

function refused() {
  const { refused: found } = view.status;
  if (found.length === 0) return null;
  return h('section', { class: 'panel refused', key: 'refused', 'aria-labelledby': 'refused' }, h('h2', { id: 'refused' }, 'Pods that may have no part in the job'), h('ul', null, found.map((text) => h('li', null, text))));
}

function why() {
  if (view.why.length === 0) return null;
  return h('details', { class: 'panel why', key: 'why' }, h('summary', null, 'Why ranks are where they are: the last plan'), h('ul', null, view.why.map((line) => h('li', null, line))));
}

function footer() {
  const { status } = view;
  const restarts = view.restarts.length > 0 ? `; ${many(view.restarts.length, 'restart')} of the rendezvous seen by this page` : '';
  return h('footer', { key: 'footer' }, `Rendezvous up since ${moment(view.since)}, term ${status.term}${restarts}. Times are UTC. It keeps its last 20 recoveries; unbroken timeline shows those of earlier ones.`);
}

/** Tell who cannot see the page what has changed, in one sentence. */
function announce() {
  const { state, status, running } = view;
  const text = `${status.job}: ${state.word}. ${running ? `Recovery ${running.number}, ${running.cause}.` : ''}`;
  if (text !== told) news.textContent = told = text;
}

async function ask() {
  const query = memory.term === null ? '' : `?term=${memory.term}&after=${view.status.revision}&timeout=${WAIT_S}`;
  const answer = await fetch(`status${query}`, { signal: AbortSignal.timeout(ANSWER_MS), cache: 'no-store' });
  if (answer.status === 401) throw new Error('not signed in any more: start unbroken page again');
  if (!answer.ok) throw new Error(((await answer.text()).trim() || `the rendezvous answers ${answer.status}`).slice(0, 300));
  return answer.json();
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function whenVisible() {
  return document.hidden ? new Promise((resolve) => document.addEventListener('visibilitychange', resolve, { once: true })) : null;
}

async function follow() {
  for (;;) {
    await whenVisible();
    try {
      const answer = await ask();
      [view, memory] = digest(answer, memory);
      aheadMs = view.now - Date.now();
      trouble = null;
      announce();
    } catch (error) {
      trouble = error instanceof TypeError || error.name === 'TimeoutError' ? 'no answer' : error.message;
    }
    show();
    await pause(trouble ? RETRY_MS : PAUSE_MS);
  }
}

setInterval(() => {
  if (view !== null && !document.hidden && view.running !== null && trouble === null) show();
}, TICK_MS);
show();
follow();
