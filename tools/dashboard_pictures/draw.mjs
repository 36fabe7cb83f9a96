// Draws each dashboard of the chart as a PNG, from a Prometheus that has data:
//   node draw.mjs --prometheus=http://127.0.0.1:9090 --from=UNIX_S --to=UNIX_S --out=FOLDER [--var=BOARD.NAME=VALUE ...]
// BOARD is the name of a file of charts/unbroken/dashboards. CHROMIUM names the browser's program.

import { createServer } from 'node:http';
import { mkdir, mkdtemp, readFile, readdir, rm, stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { build } from 'esbuild';
import puppeteer from 'puppeteer-core';

import { answersOf } from './prometheus.mjs';

const HERE = dirname(fileURLToPath(import.meta.url));
const BOARDS = join(HERE, '../../charts/unbroken/dashboards');
const ICONS = join(HERE, 'node_modules/@grafana/ui/dist/public');
const FONT = join(HERE, 'node_modules/@fontsource-variable/inter/files/inter-latin-wght-normal.woff2');
const WIDTH_PX = 1440;
const LIMIT_MS = 120_000;
const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml' };

function readOptions() {
  const { values } = parseArgs({
    options: {
      prometheus: { type: 'string' },
      from: { type: 'string' },
      to: { type: 'string' },
      out: { type: 'string' },
      interval: { type: 'string', default: '15' },
      boards: { type: 'string', default: BOARDS },
      var: { type: 'string', multiple: true, default: [] },
    },
  });
  const missing = ['prometheus', 'from', 'to', 'out'].filter((name) => !values[name]);
  if (missing.length > 0) {
    throw new Error(`want ${missing.map((name) => `--${name}`).join(', ')}; see the head of draw.mjs`);
  }
  const chosen = Object.fromEntries(values.var.map((text) => text.split('=')));
  return { ...values, from: Number(values.from), to: Number(values.to), interval: Number(values.interval), chosen };
}

async function bundle(folder) {
  await build({
    entryPoints: [join(HERE, 'page/index.jsx')],
    bundle: true,
    outfile: join(folder, 'page.js'),
    jsx: 'automatic',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.woff2': 'dataurl', '.woff': 'dataurl', '.ttf': 'dataurl', '.svg': 'dataurl', '.png': 'dataurl' },
    logLevel: 'error',
  });
}

// The file of a path: Grafana's components ask for icons and fonts below /public.
function fileOf(path, folder) {
  if (path.startsWith('/public/fonts/')) return FONT;
  return path.startsWith('/public/') ? join(ICONS, path.replace(/^\/public\/(build\/)?/, '')) : join(folder, basename(path));
}

// Serves the page, its data, and the icons that Grafana's components ask for.
async function serve(folder, data) {
  const links = '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page.css">';
  const html = `<!doctype html>${links}<div id="root"></div><script src="/page.js"></script>`;
  const server = createServer(async (request, response) => {
    const path = new URL(request.url, 'http://page').pathname;
    const [, board] = path.match(/^\/data\/(\w+)$/) ?? [];
    try {
      const file = fileOf(path, folder);
      const body = board ? JSON.stringify(data[board]) : path === '/' ? html : await readFile(file);
      const type = path === '/' ? 'text/html' : TYPES[path.match(/\.\w+$/)?.[0]] ?? 'application/json';
      response.writeHead(200, { 'content-type': type }).end(body);
    } catch (error) {
      console.error(`not found: ${path}`);
      response.writeHead(404).end(String(error));
    }
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return server;
}

async function photograph(browser, url, file) {
  const page = await browser.newPage();
  const faults = [];
  page.on('pageerror', (error) => faults.push(String(error)));
  page.on('console', (message) => message.type() === 'error' && faults.push(message.text()));
  await page.setViewport({ width: WIDTH_PX, height: 900 });
  await page.goto(url, { timeout: LIMIT_MS });
  await page.waitForFunction('window.isDrawn === true', { timeout: LIMIT_MS }).catch((error) => faults.push(String(error)));
  const height = await page.evaluate('document.documentElement.scrollHeight');
  await page.setViewport({ width: WIDTH_PX, height });
  await page.evaluate('new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))');
  await page.screenshot({ path: file });
  const empty = await page.evaluate('window.emptyPanels');
  await page.close();
  console.log(`${file}: ${Math.round((await stat(file)).size / 1000)} kB`);
  return [...faults, ...(empty ?? []).map((title) => `empty panel: ${title}`)];
}

async function main() {
  const options = readOptions();
  const folder = await mkdtemp(join(tmpdir(), 'pictures-'));
  const names = (await readdir(options.boards)).filter((name) => name.endsWith('.json')).map((name) => basename(name, '.json'));
  const data = {};
  for (const name of names) {
    const board = JSON.parse(await readFile(join(options.boards, `${name}.json`), 'utf8'));
    data[name] = await answersOf(name, board, options);
  }
  await mkdir(options.out, { recursive: true });
  await bundle(folder);
  const server = await serve(folder, data);
  const program = process.env.CHROMIUM ?? '/usr/bin/chromium';
  const browser = await puppeteer.launch({ executablePath: program, args: ['--no-sandbox', '--hide-scrollbars'] });
  const faults = [];
  try {
    for (const name of names) {
      const url = `http://127.0.0.1:${server.address().port}/?board=${name}`;
      const found = await photograph(browser, url, join(options.out, `${name}.png`));
      faults.push(...found.map((fault) => `${name}: ${fault}`));
    }
  } finally {
    await browser.close();
    server.close();
    await rm(folder, { recursive: true });
  }
  faults.forEach((fault) => console.error(fault));
  return faults.length > 0 ? 1 : 0;
}

process.exitCode = await main();
