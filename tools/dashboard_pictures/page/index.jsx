// One dashboard, laid out as Grafana does.

import 'uplot/dist/uPlot.min.css';

import { ThemeContext, createTheme, dateTime } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { useEffect } from 'react';
import { createRoot } from 'react-dom/client';

import { regionsOf } from './annotations.jsx';
import { framesOf, isEmpty } from './frames.js';
import { KINDS } from './panels.jsx';

const COLUMNS = 24;
const CELL_PX = 30;
const GAP_PX = 8;
const SETTLE_MS = 1500;

const theme = createTheme({ colors: { mode: 'dark' } });

const place = ({ x, y, w, h }, width) => {
  const column = (width + GAP_PX) / COLUMNS;
  return {
    position: 'absolute',
    left: x * column,
    top: y * (CELL_PX + GAP_PX),
    width: w * column - GAP_PX,
    height: h * (CELL_PX + GAP_PX) - GAP_PX,
  };
};

function Panel({ panel, frames, range, regions, box }) {
  const Kind = KINDS[panel.type];
  const { width, height } = box;
  return (
    <div style={box}>
      <PanelChrome title={panel.title} description={panel.description || undefined} width={width} height={height}>
        {(innerWidth, innerHeight) =>
          isEmpty(frames) ? (
            'No data'
          ) : (
            <Kind {...{ panel, frames, range, regions, theme }} width={innerWidth} height={innerHeight} />
          )
        }
      </PanelChrome>
    </div>
  );
}

function Head({ board, variables, range }) {
  const box = { background: theme.colors.background.secondary, borderRadius: 2, padding: '4px 8px', marginLeft: 8 };
  const words = Object.entries(variables).map(([name, value]) => [name.replace('_', ' '), value.includes('|') ? 'All' : value]);
  const span = `${range.from.utc().format('YYYY-MM-DD HH:mm:ss')} to ${range.to.utc().format('HH:mm:ss')} UTC`;
  return (
    <div style={{ display: 'flex', alignItems: 'center', height: 48, fontSize: 14 }}>
      <span style={{ fontSize: 18, fontWeight: 500, flexGrow: 1 }}>{board.title}</span>
      {words.map(([name, value]) => (
        <span key={name} style={box}>
          <span style={{ color: theme.colors.text.secondary }}>{name}</span> {value}
        </span>
      ))}
      <span style={box}>{span}</span>
    </div>
  );
}

function Dashboard({ data }) {
  const width = document.documentElement.clientWidth - 2 * 16;
  const range = { from: dateTime(data.from * 1000), to: dateTime(data.to * 1000) };
  range.raw = { from: range.from, to: range.to };
  const regions = data.annotations.flatMap(regionsOf);
  const bottom = Math.max(...data.board.panels.map(({ gridPos: { y, h } }) => y + h));
  const drawn = data.board.panels.map((panel) => {
    const box = place(panel.gridPos, width);
    if (panel.type === 'row') {
      return (
        <div key={panel.id} style={{ ...box, fontWeight: 500, lineHeight: `${CELL_PX}px` }}>
          <span style={{ color: theme.colors.text.secondary }}>⌄</span> {panel.title}
        </div>
      );
    }
    const frames = framesOf(panel, data.panels[panel.id], data, theme);
    return <Panel key={panel.id} {...{ panel, frames, range, regions, box }} />;
  });
  const isBlank = (panel) => panel.type !== 'row' && data.panels[panel.id].every(({ result }) => result.length === 0);
  useEffect(() => {
    window.emptyPanels = data.board.panels.filter(isBlank).map(({ title }) => title);
    // Icons and fonts come later than the panels.
    document.fonts.ready.then(() => setTimeout(() => (window.isDrawn = true), SETTLE_MS));
  }, []);
  return (
    <div style={{ padding: '0 16px 8px', background: theme.colors.background.canvas, color: theme.colors.text.primary }}>
      <Head board={data.board} variables={data.variables} range={range} />
      <div style={{ position: 'relative', height: bottom * (CELL_PX + GAP_PX) }}>{drawn}</div>
    </div>
  );
}

async function draw() {
  // Components measure their texts when they are drawn.
  document.fonts.add(await new FontFace('Inter', 'url(/public/fonts/inter/Inter-Regular.woff2)', { weight: '100 900' }).load());
  const board = new URLSearchParams(window.location.search).get('board');
  const data = await (await fetch(`/data/${board}`)).json();
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Dashboard data={data} />
    </ThemeContext.Provider>,
  );
}

// Where Grafana's icons come from.
window.__grafana_public_path__ = '/public/';
draw();
