// One function a kind of panel: Grafana's component with the options that the dashboard's JSON has.

import { VizOrientation, getDisplayValueAlignmentFactors, reduceField } from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

import { Annotations } from './annotations.jsx';
import { StateTimeline } from './timeline.jsx';

const valueOf = ({ fields }, calcs) => {
  const field = fields.find(({ type }) => type === 'number');
  const value = reduceField({ field: { ...field, state: undefined }, reducers: calcs })[calcs[0]];
  return { field, display: { ...field.display(value), title: field.state.displayName } };
};

function Lines({ panel, frames, range, regions, theme, width, height }) {
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      timeRange={range}
      timeZone="utc"
      width={width}
      height={height}
      legend={panel.options.legend}
      options={panel.options}
      theme={theme}
    >
      {(config) => <Annotations config={config} regions={regions} theme={theme} />}
    </TimeSeries>
  );
}

function Numbers({ panel, frames, theme, width, height }) {
  const { reduceOptions, colorMode, graphMode, justifyMode, textMode } = panel.options;
  const { display } = valueOf(frames[0], reduceOptions.calcs);
  const value = { ...display, title: undefined };
  const looks = { colorMode: colorMode ?? 'value', graphMode: graphMode ?? 'none', justifyMode, textMode: textMode ?? 'auto' };
  return <BigValue value={value} width={width} height={height} theme={theme} {...looks} />;
}

function Bars({ panel, frames, theme, width, height }) {
  const values = () => frames.map((frame) => valueOf(frame, panel.options.reduceOptions.calcs));
  const top = Math.max(...values().map(({ display }) => display.numeric));
  const alignmentFactors = getDisplayValueAlignmentFactors(values());
  const one = ({ value, width: itemWidth, height: itemHeight }) => (
    <BarGauge
      value={value.display}
      field={{ ...value.field.config, min: value.field.config.min ?? 0, max: value.field.config.max ?? top }}
      display={value.field.display}
      width={itemWidth}
      height={itemHeight}
      orientation={VizOrientation.Horizontal}
      displayMode={panel.options.displayMode}
      valueDisplayMode={'color'}
      namePlacement={panel.options.namePlacement ?? 'auto'}
      alignmentFactors={alignmentFactors}
      showUnfilled={panel.options.showUnfilled ?? true}
      theme={theme}
    />
  );
  return (
    <VizRepeater
      source={frames}
      renderCounter={1}
      getValues={values}
      renderValue={one}
      width={width}
      height={height}
      orientation={VizOrientation.Horizontal}
      minVizHeight={panel.options.minVizHeight ?? 16}
      maxVizHeight={panel.options.maxVizHeight ?? 300}
    />
  );
}

function Table({ panel, frames, width, height }) {
  const sortBy = panel.options?.sortBy ?? [];
  return <TableNG data={frames[0]} width={width} height={height} sortBy={sortBy} timeRange={undefined} />;
}

export const KINDS = {
  timeseries: Lines,
  stat: Numbers,
  bargauge: Bars,
  table: Table,
  'state-timeline': StateTimeline,
};
