// Annotations as Grafana's time series panel draws them. That part of Grafana is not in its npm packages.

import { colorManipulator } from '@grafana/data';
import { useLayoutEffect, useState } from 'react';

const MARK_PX = 5;
const FILL = 0.1;

// Samples that follow each other step by step are one region.
export function regionsOf({ annotation, step, result }) {
  return result.flatMap(({ values }) => {
    const regions = [];
    for (const [second] of values) {
      const last = regions.at(-1);
      if (last && second * 1000 - last.to <= step * 1000) last.to = second * 1000;
      else regions.push({ from: second * 1000, to: second * 1000, color: annotation.iconColor });
    }
    return regions;
  });
}

function draw(plot, regions, theme) {
  const { ctx, bbox } = plot;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + MARK_PX);
  ctx.clip();
  ctx.setLineDash([5, 5]);
  for (const { from, to, color: name } of regions) {
    const color = theme.visualization.getColorByName(name);
    const [left, right] = [from, to].map((time) => Math.round(plot.valToPos(time, 'x', true)));
    ctx.fillStyle = colorManipulator.alpha(color, FILL);
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.strokeStyle = ctx.fillStyle = color;
    for (const x of new Set([left, right])) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    ctx.fillRect(left, bottom, Math.max(right - left, MARK_PX), MARK_PX);
  }
  ctx.restore();
}

export function Annotations({ config, regions, theme }) {
  const [isHooked, setHooked] = useState(false);
  useLayoutEffect(() => {
    if (isHooked) return;
    config.addHook('draw', (plot) => draw(plot, regions, theme));
    setHooked(true);
  }, [config, regions, theme, isHooked]);
  return null;
}
