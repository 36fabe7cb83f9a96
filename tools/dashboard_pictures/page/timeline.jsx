// A state timeline on Grafana's plot and legend. The panel itself is not in Grafana's npm packages.

import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend, measureText } from '@grafana/ui';
import { useMemo } from 'react';

const colorOf = (field, value) => field.display(value).color;

// Stretches of one value: [from, to, value].
function stretches(times, values, end) {
  const found = [];
  values.forEach((value, index) => {
    if (value === null) return;
    const until = times[index + 1] ?? end;
    const last = found.at(-1);
    if (last && last[2] === value && last[1] === times[index]) last[1] = until;
    else found.push([times[index], until, value]);
  });
  return found;
}

function drawRows(plot, rows, rowHeight, fillOpacity) {
  const { ctx, bbox } = plot;
  const band = bbox.height / rows.length;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.globalAlpha = fillOpacity / 100;
  rows.forEach(({ field, times, end }, index) => {
    const top = bbox.top + band * (index + (1 - rowHeight) / 2);
    for (const [from, to, value] of stretches(times, field.values, end)) {
      const left = plot.valToPos(from, 'x', true);
      ctx.fillStyle = colorOf(field, value);
      ctx.fillRect(left, top, Math.max(plot.valToPos(to, 'x', true) - left, 1), band * rowHeight);
    }
  });
  ctx.restore();
}

const FONT_PX = 12;
const AXIS_GAP_PX = 18;

function configOf(rows, panel, range, theme) {
  const config = new UPlotConfigBuilder('utc');
  const names = rows.map(({ field }) => field.state.displayName);
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  config.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right, range: [from, to],
  });
  config.addScale({
    scaleKey: 'y', orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: [0, rows.length],
  });
  config.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: 'utc', theme, grid: { show: true } });
  config.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    splits: rows.map((_, index) => rows.length - index - 0.5),
    values: names,
    size: AXIS_GAP_PX + Math.max(...names.map((name) => measureText(name, FONT_PX).width)),
    grid: { show: false },
    ticks: { show: false },
    theme,
  });
  config.addSeries({ scaleKey: 'y', theme, pathBuilder: () => null, pointsBuilder: () => null, lineWidth: 0, show: true });
  const { fillOpacity } = panel.fieldConfig.defaults.custom;
  config.addHook('draw', (plot) => drawRows(plot, rows, panel.options.rowHeight, fillOpacity));
  return config;
}

// The legend names values that are mapped to a text; rows are named on the axis.
function legendItems(rows) {
  const texts = new Map();
  for (const { field } of rows) {
    for (const value of field.values) {
      if (value === null) continue;
      const { text, color } = field.display(value);
      texts.set(text, { label: text, color, yAxis: 1 });
    }
  }
  return [...texts.values()];
}

export function StateTimeline({ panel, frames, range, theme, width, height }) {
  const end = range.to.valueOf();
  const rows = frames.map(({ fields: [time, field] }) => ({ field, times: time.values, end }));
  const config = useMemo(() => configOf(rows, panel, range, theme), [panel, range, theme]);
  const { displayMode, placement, showLegend } = panel.options.legend;
  const legend = showLegend ? (
    <VizLayout.Legend placement={placement}>
      <VizLegend items={legendItems(rows)} displayMode={displayMode} placement={placement} readonly />
    </VizLayout.Legend>
  ) : null;
  const data = [rows[0].times, rows[0].times.map(() => null)];
  return (
    <VizLayout width={width} height={height} legend={legend}>
      {(innerWidth, innerHeight) => <UPlotChart config={config} data={data} width={innerWidth} height={innerHeight} />}
    </VizLayout>
  );
}
