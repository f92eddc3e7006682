"use strict";
// Ticks of axes, and the scale from values to pixels.
(() => {
  viewer.niceStep = (span, n) => {
    const rough = span / Math.max(1, n);
    const power = 10 ** Math.floor(Math.log10(rough));
    const factor = rough / power;
    return power * (factor < 1.4 ? 1 : factor < 3.2 ? 2 : factor < 7.1 ? 5 : 10);
  };

  viewer.ticks = (low, high, n, { isWhole } = {}) => {
    if (!(high > low)) return [low];
    let step = viewer.niceStep(high - low, n);
    if (isWhole) step = Math.max(1, step);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  };

  const SECONDS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200];
  const DAY = 86400;

  viewer.timeTicks = (low, high, n) => {
    const rough = (high - low) / Math.max(1, n);
    const step = SECONDS.find((s) => s >= rough) || DAY * viewer.niceStep((high - low) / DAY, n);
    const offset = new Date(low * 1000).getTimezoneOffset() * 60;
    const found = [];
    for (let t = Math.ceil((low - offset) / step) * step + offset; t <= high; t += step) found.push(t);
    return found;
  };

  viewer.timeTick = (span) => {
    const options =
      span > 3 * DAY
        ? { day: "numeric", month: "short" }
        : span > 300
          ? { hour: "2-digit", minute: "2-digit" }
          : { hour: "2-digit", minute: "2-digit", second: "2-digit" };
    const format = new Intl.DateTimeFormat("en-GB", options);
    return (seconds) => format.format(new Date(seconds * 1000));
  };

  // Labels with as many digits as tell neighbouring ticks apart.
  viewer.tickLabels = (ticks) => {
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(ticks[0]) || 1;
    const greatest = Math.max(...ticks.map(Math.abs));
    if (greatest >= 1e15 || (greatest > 0 && greatest < 1e-4)) return ticks.map((t) => (t === 0 ? "0" : exponent(t, step)));
    for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (greatest >= unit * (suffix === "k" ? 10 : 1)) return ticks.map((t) => (t === 0 ? "0" : `${fixed(t / unit, step / unit)}${suffix}`));
    }
    return ticks.map((t) => fixed(t, step));
  };

  function exponent(value, step) {
    const digits = Math.max(0, Math.min(8, Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(step) + 1e-9)));
    return value.toExponential(digits).replace("e+", "e").replaceAll("-", "−");
  }

  function fixed(value, step) {
    const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
    return value.toFixed(digits).replace("-", "−");
  }

  viewer.scale = (low, high, from, to) => {
    const factor = (to - from) / (high - low || 1);
    const scale = (value) => from + (value - low) * factor;
    scale.invert = (pixel) => low + (pixel - from) / factor;
    return scale;
  };

  // The range of numbers with room above and below; a constant gets a range around it.
  viewer.padded = (low, high) => {
    if (!(low <= high)) return [0, 1];
    const room = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
    return [low - room, high + room];
  };
})();
