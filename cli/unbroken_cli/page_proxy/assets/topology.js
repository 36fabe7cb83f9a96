// Where the ranks are: domains as nested boxes that open and close, pods in them in as much detail as there is room for.

import { h } from './dom.js';
import { KINDS, KIND_NAMES, KIND_WORDS, TROUBLE, count, many, ranges } from './words.js';

const MAX_CARDS = 96;
const MAX_CHIPS = 512;
const MAX_NAMED = 20;

/** Which boxes a person has opened or closed, by the domain's id; all others follow `isUsuallyOpen`. */
const chosen = new Map();

/** Return the section. `again` is called when a person has opened or closed a box. */
export function topology(view, again) {
  const { tree } = view;
  const detail = tree.numPods <= MAX_CARDS ? 'cards' : tree.numPods <= MAX_CHIPS ? 'chips' : 'dots';
  return h(
    'section', { class: 'panel topology', 'aria-labelledby': 'where', key: 'topology' },
    h('div', { class: 'title' }, h('h2', { id: 'where' }, 'Where the ranks are'), legend(tree.counts)),
    detail === 'cards' ? null : troubles(view.pods),
    tree.numPods === 0 ? h('p', { class: 'soft' }, 'No pod has joined yet.') : contents(tree, detail, tree.numPods, again),
  );
}

function legend(counts) {
  const shown = KINDS.filter((kind) => counts[kind]).reverse();
  return h('ul', { class: 'legend', 'aria-label': 'ranks by state' }, shown.map((kind) => h('li', { key: kind }, h('i', { class: `cell ${kind}`, 'aria-hidden': 'true' }), `${count(counts[kind])} ${KIND_NAMES[kind]}`)));
}

function contents(domain, detail, numAll, again) {
  const areInnermost = domain.children.every((child) => child.children.length === 0);
  return [
    domain.children.length > 0 &&
      h('div', { class: `domains ${areInnermost ? 'innermost' : ''} ${detail}` }, domain.children.map((child) => box(child, detail, numAll, again))),
    domain.pods.length > 0 && pods(domain, detail),
  ];
}

function box(domain, detail, numAll, again) {
  const isOpen = chosen.get(domain.id) ?? isUsuallyOpen(domain, numAll);
  const toggle = (event) => {
    if (event.target.open !== isOpenNow(domain, numAll)) {
      chosen.set(domain.id, event.target.open);
      again();
    }
  };
  return h(
    'details', { key: domain.id, class: `domain ${domain.troubles ? 'troubled' : ''}`, open: isOpen, ontoggle: toggle },
    h(
      'summary', { title: `${domain.layer} ${domain.name}: ${sum(domain)}`.trim() },
      h('span', { class: 'layer' }, domain.layer), ' ', h('span', { class: 'name' }, domain.name), ' ',
      h('span', { class: 'sum' }, detail !== 'cards' ? many(domain.numPods, 'pod') : domain.numPods > 1 ? sum(domain) : ''),
      h('span', { class: 'unseen' }, detail === 'cards' && domain.numPods > 1 ? '' : `: ${sum(domain)}`),
      isOpen ? null : bar(domain.counts),
    ),
    isOpen ? contents(domain, detail, numAll, again) : null,
  );
}

function isOpenNow(domain, numAll) {
  return chosen.get(domain.id) ?? isUsuallyOpen(domain, numAll);
}

function isUsuallyOpen(domain, numAll) {
  return numAll <= MAX_CHIPS || domain.children.length > 0 || domain.troubles > 0;
}

function sum(domain) {
  return KINDS.filter((kind) => domain.counts[kind]).reverse().map((kind) => `${count(domain.counts[kind])} ${KIND_NAMES[kind]}`).join(', ');
}

function bar(counts) {
  const total = Object.values(counts).reduce((all, number) => all + number, 0);
  return h('span', { class: 'bar', 'aria-hidden': 'true' }, KINDS.toReversed().filter((kind) => counts[kind]).map((kind) => h('i', { class: kind, style: { width: `${(100 * counts[kind]) / total}%` } })));
}

function pods(domain, detail) {
  if (detail === 'dots') {
    return h('div', { class: 'pods dots', role: 'img', 'aria-label': `${many(domain.numPods, 'pod')}: ${sum(domain)}` }, domain.pods.map((pod) => h('i', { key: pod.uid, class: `cell ${pod.kind}`, title: describe(pod) })));
  }
  return h('ul', { class: `pods ${detail}` }, domain.pods.map((pod) => (detail === 'cards' ? card(pod) : chip(pod))));
}

function card(pod) {
  return h(
    'li', { key: pod.uid, class: `pod ${pod.kind} ${pod.isCulprit ? 'culprit' : ''}`, title: describe(pod) },
    h('span', { class: 'unseen' }, describe(pod)),
    h('span', { class: 'head', 'aria-hidden': 'true' }, h('b', null, pod.name), h('span', { class: 'soft' }, pod.kind === 'spare' ? 'spare' : pod.domains.at(-1) === pod.node ? '' : pod.node)),
    h('span', { class: 'cells', 'aria-hidden': 'true' }, pod.cells.map((cell) => h('i', { class: `cell ${cell.kind}` }, cell.rank === null ? '' : String(cell.rank)))),
  );
}

function chip(pod) {
  return h(
    'li', { key: pod.uid, class: `pod ${pod.kind} ${pod.isCulprit ? 'culprit' : ''}`, title: describe(pod) },
    h('span', { class: 'unseen' }, describe(pod)),
    h('span', { class: 'cells', 'aria-hidden': 'true' }, pod.cells.map((cell) => h('i', { class: `cell ${cell.kind}` }))),
  );
}

/** digits-3 on node-a1: ranks 6-7, trains */
function describe(pod) {
  const place = pod.node ? ` on ${pod.node}` : '';
  const ranks = pod.ranks.length > 0 ? `${pod.ranks.length > 1 ? 'ranks' : 'rank'} ${ranges(pod.ranks)}, ` : '';
  const kinds = KINDS.filter((kind) => pod.cells.some((cell) => cell.kind === kind)).map((kind) => KIND_WORDS[kind]);
  return `${pod.name}${place}: ${ranks}${kinds.join('; ') || 'no workers yet'}${pod.isCulprit ? '; the culprit' : ''}`;
}

/** Where pods are too many to bear their names, those that a person should look at are named here. */
function troubles(all) {
  const found = all.filter((pod) => TROUBLE.has(pod.kind));
  if (found.length === 0) return null;
  const more = found.length - MAX_NAMED;
  return h(
    'div', { class: 'troubles' }, h('h3', null, `${many(found.length, 'pod')} to look at`),
    h('ul', null, found.slice(0, MAX_NAMED).map((pod) => h('li', { key: pod.uid }, h('i', { class: `cell ${pod.kind}`, 'aria-hidden': 'true' }), describe(pod)))),
    more > 0 ? h('p', { class: 'soft' }, `and ${many(more, 'other')}`) : null,
  );
}
