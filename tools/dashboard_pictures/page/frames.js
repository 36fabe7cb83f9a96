// What Grafana's data source and panel model make of an answer: data frames with names, units and colours.

import { FieldType, fieldMatchers, getDisplayProcessor, getFieldDisplayName } from '@grafana/data';
import { set } from 'lodash';

const legend = (format, labels) =>
  format ? format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '') : JSON.stringify(labels);

const number = (text) => (text === 'NaN' ? null : Number(text));

function seriesFrames({ target, step, result }, from, to) {
  return result.map(({ metric, values, value }) => {
    const pairs = values ?? [value];
    const found = new Map(pairs.map(([second, text]) => [second, number(text)]));
    const times = target.instant ? pairs.map(([second]) => second) : steps(Math.floor(from / step) * step, to, step);
    return {
      refId: target.refId,
      length: times.length,
      fields: [
        { name: 'Time', type: FieldType.time, config: { interval: step * 1000 }, values: times.map((second) => second * 1000) },
        {
          name: 'Value',
          type: FieldType.number,
          labels: metric,
          config: { displayNameFromDS: legend(target.legendFormat, metric) },
          values: times.map((second) => found.get(second) ?? null),
        },
      ],
    };
  });
}

function steps(from, to, step) {
  return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, index) => from + index * step);
}

function tableFrame({ target, result }) {
  const names = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const column = (name) => ({
    name,
    type: FieldType.string,
    config: {},
    values: result.map(({ metric }) => metric[name] ?? ''),
  });
  const time = { name: 'Time', type: FieldType.time, config: {}, values: result.map(({ value }) => value[0] * 1000) };
  const value = { name: 'Value', type: FieldType.number, config: {}, values: result.map((row) => number(row.value[1])) };
  return { refId: target.refId, length: result.length, fields: [time, ...names.map(column), value] };
}

// Field configuration: defaults of the panel, then its overrides.
function configure(frames, { defaults, overrides }, theme) {
  let seriesIndex = 0;
  for (const frame of frames) {
    for (const field of frame.fields) {
      const { custom, ...plain } = defaults;
      field.config = { ...plain, ...field.config, custom: { ...custom } };
      for (const { matcher, properties } of overrides ?? []) {
        if (fieldMatchers.get(matcher.id).get(matcher.options)(field, frame, frames)) {
          properties.forEach(({ id, value }) => set(field.config, id, value));
        }
      }
      if (field.type === FieldType.number) {
        field.state = { seriesIndex };
        seriesIndex += 1;
      }
      field.config.color ??= { mode: field.type === FieldType.number ? defaultColor(field.config) : 'thresholds' };
      field.config.thresholds ??= { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }] };
      field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    }
  }
  for (const frame of frames) {
    frame.fields.forEach((field) => (field.state = { ...field.state, displayName: getFieldDisplayName(field, frame, frames) }));
  }
  return frames;
}

const defaultColor = (config) => (config.custom?.lineWidth === undefined ? 'thresholds' : 'palette-classic');

// Only what the dashboards use; a dashboard that asks for more stops the drawing.
function transform(frame, transformations) {
  return transformations.reduce((seen, { id, options }) => {
    if (id !== 'organize') throw new Error(`transformation ${id}: not known here`);
    const { excludeByName = {}, indexByName = {}, renameByName = {} } = options;
    const fields = seen.fields
      .filter(({ name }) => !excludeByName[name])
      .sort((one, other) => (indexByName[one.name] ?? 99) - (indexByName[other.name] ?? 99))
      .map((field) => ({ ...field, config: { ...field.config, displayName: renameByName[field.name] || undefined } }));
    return { ...seen, fields };
  }, frame);
}

export function framesOf(panel, answers, range, theme) {
  const isTable = panel.type === 'table';
  const frames = isTable
    ? answers.map(tableFrame).map((frame) => transform(frame, panel.transformations ?? []))
    : answers.flatMap((answer) => seriesFrames(answer, range.from, range.to));
  return configure(frames, panel.fieldConfig, theme);
}

export const isEmpty = (frames) => frames.every((frame) => frame.length === 0);
