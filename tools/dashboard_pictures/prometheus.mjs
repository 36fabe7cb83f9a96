// Asks a Prometheus what Grafana's data source would ask for a dashboard, variables filled in.

const MAX_POINTS = 700;
const MIN_STEP_S = 0.5;

const seconds = (text) => {
  const [, number, unit] = text.match(/^(\d+)(ms|s|m|h)$/);
  return Number(number) * { ms: 0.001, s: 1, m: 60, h: 3600 }[unit];
};

async function ask(options, path, words) {
  const query = new URLSearchParams(Object.entries(words));
  const response = await fetch(`${options.prometheus}/api/v1/${path}?${query}`, { signal: AbortSignal.timeout(60_000) });
  const answer = await response.json();
  if (answer.status !== 'success') {
    throw new Error(`${path} ${JSON.stringify(words)}: ${answer.error}`);
  }
  return answer.data;
}

// Grafana's words for the time range, and the values of the board's variables.
function filled(text, values) {
  return text.replace(/\$\{?(\w+)\}?/g, (whole, name) => values[name] ?? whole);
}

// The step of a range query and the words that follow from it, as Grafana computes them.
function timing(options, panel) {
  const range = options.to - options.from;
  const least = panel?.interval ? seconds(panel.interval) : MIN_STEP_S;
  const step = Math.max(Math.ceil(range / MAX_POINTS), least);
  const rate = Math.max(step + options.interval, 4 * options.interval);
  return { step, words: { __range: `${range}s`, __range_s: range, __interval: `${step}s`, __rate_interval: `${rate}s` } };
}

async function variables(name, board, options) {
  const chosen = {};
  for (const variable of board.templating.list.filter((item) => item.type === 'query')) {
    const query = filled(variable.query.query ?? variable.query, chosen);
    const [, selector, label] = query.match(/^label_values\((.*), *(\w+)\)$/);
    const found = await ask(options, `label/${label}/values`, { 'match[]': selector, start: options.from, end: options.to });
    const isAll = variable.includeAll;
    chosen[variable.name] = options.chosen[`${name}.${variable.name}`] ?? (isAll ? found.join('|') : found[0]);
  }
  return chosen;
}

// Everything that the page needs of one dashboard. Times in seconds.
export async function answersOf(name, board, options) {
  const chosen = await variables(name, board, options);
  const panels = {};
  for (const panel of board.panels) {
    panels[panel.id] = [];
    for (const target of panel.targets ?? []) {
      const { step, words } = timing(options, panel);
      const query = filled(target.expr, { ...chosen, ...words });
      // Grafana lets range queries begin at whole steps.
      const start = Math.floor(options.from / step) * step;
      const data = target.instant
        ? await ask(options, 'query', { query, time: options.to })
        : await ask(options, 'query_range', { query, start, end: options.to, step });
      panels[panel.id].push({ target, step, result: data.result });
    }
  }
  const annotations = [];
  for (const annotation of board.annotations?.list ?? []) {
    if (!annotation.expr) continue;
    const step = seconds(annotation.step ?? '60s');
    const query = filled(annotation.expr, { ...chosen, ...timing(options).words });
    const { result } = await ask(options, 'query_range', { query, start: options.from, end: options.to, step });
    annotations.push({ annotation, step, result });
  }
  return { board, variables: chosen, panels, annotations, from: options.from, to: options.to };
}
