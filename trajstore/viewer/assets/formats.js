"use strict";
// Numbers, bytes, times and durations as people read them.
(() => {
  const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

  const large = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 2 });

  viewer.count = (n) => (n === null || n === undefined ? "–" : whole.format(n));

  viewer.plural = (n, noun) => `${viewer.count(n)} ${noun}${n === 1 ? "" : "s"}`;

  viewer.short = (n) => {
    const size = Math.abs(n);
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) {
        const scale = suffix === "k" ? 1e3 : unit;
        return `${trimmed((n / scale).toPrecision(3))}${suffix}`;
      }
    }
    return viewer.number(n);
  };

  viewer.number = (x) => {
    if (x === null || x === undefined) return "–";
    if (typeof x === "boolean") return x ? "true" : "false";
    if (typeof x !== "number") return String(x);
    const size = Math.abs(x);
    if (Number.isInteger(x) && size < 1e12) return whole.format(x);
    if (size >= 1e5 && size < 1e12) return large.format(x); // such as a time in seconds
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return trimmedExponent(x.toExponential(2));
    return trimmed(x.toPrecision(5));
  };

  function trimmed(text) {
    return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
  }

  function trimmedExponent(text) {
    const [mantissa, exponent] = text.split("e");
    return `${trimmed(mantissa)}e${exponent.replace("+", "")}`;
  }

  // A function that writes all numbers of a column with the same number of decimals.
  viewer.numbers = (values) => {
    const finite = values.filter((v) => typeof v === "number");
    const greatest = Math.max(...finite.map(Math.abs), 0);
    if (finite.every(Number.isInteger) || greatest >= 1e7 || greatest < 1e-3) return viewer.number;
    const digits = Math.max(0, Math.min(5, 4 - Math.ceil(Math.log10(greatest))));
    const format = new Intl.NumberFormat("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return (value) => (typeof value === "number" ? format.format(value) : viewer.number(value));
  };

  viewer.bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
      if (n < 1024 || unit === "TiB") return unit === "B" ? `${n} B` : `${n.toFixed(n < 10 ? 1 : 0)} ${unit}`;
      n /= 1024;
    }
    return "";
  };

  const stamp = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const onlyDay = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });
  const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
  const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

  const dated = (format) => (seconds) => {
    const date = new Date(seconds * 1000);
    return seconds === null || Number.isNaN(date.getTime()) ? "–" : format.format(date);
  };
  viewer.date = dated(stamp);
  viewer.day = dated(onlyDay);
  viewer.fullDate = dated(full);
  viewer.clock = dated(clock);

  viewer.age = (seconds) => {
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
    }
    return `${Math.max(0, Math.round(seconds))} s`;
  };

  viewer.ago = (time) => (time ? `${viewer.age(Date.now() / 1000 - time)} ago` : "–");

  viewer.shape = (field) => `${field.dtype}${field.shape.length ? ` [${field.shape.join(", ")}]` : ""}`;

  // `rank0-01k7h2uhs0...`: the name, and as much of the unique part as tells streams apart.
  viewer.shortId = (id) => {
    const cut = id.lastIndexOf("-");
    return cut < 0 || id.length - cut < 12 ? id : `${id.slice(0, cut)}-…${id.slice(-6)}`;
  };
})();
