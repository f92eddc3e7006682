"use strict";
// Where answers come from: the server, or this file if the page was exported.
(() => {
  const embedded = document.getElementById("data");
  const data = embedded ? JSON.parse(embedded.textContent) : null;
  const token = new URLSearchParams(location.search).get("token") || "";

  class Problem extends Error {
    constructor(kind, message) {
      super(message);
      this.kind = kind;
    }
  }
  viewer.Problem = Problem;
  viewer.exported = data;

  const query = (parameters) =>
    new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined));

  async function request(name, parameters) {
    let response;
    try {
      const headers = { "X-Trajstore-Token": token };
      response = await fetch(`/api/${name}?${query(parameters)}`, { headers, cache: "no-store" });
    } catch {
      throw new Problem("gone", "start it again with the same command, and open the address that it prints.");
    }
    if (response.ok) return response;
    const text = await response.text();
    let answer;
    try {
      answer = JSON.parse(text);
    } catch {
      throw new Problem("refused", text.slice(0, 300));
    }
    if (answer.kind === "expired") setTimeout(() => viewer.refresh && viewer.refresh(), 300);
    throw new Problem(answer.kind, answer.error);
  }

  const live = {
    ask: async (name, parameters = {}) => (await request(name, parameters)).json(),
    frame: async (parameters) => {
      const response = await request("frame", parameters);
      return { address: URL.createObjectURL(await response.blob()), note: response.headers.get("x-note") || "" };
    },
  };

  const keyOf = (name, parameters) => {
    const shown = { ...parameters };
    for (const unused of ["points", "start", "stop"]) delete shown[unused];
    return `${name}?${query(shown)}`;
  };

  const file = {
    ask: async (name, parameters = {}) => {
      if (name === "episodes") return listed(parameters);
      if (name === "values") return {};
      const answer = data.answers[keyOf(name, parameters)];
      if (answer === undefined) {
        throw new Problem("left_out", "this file holds some episodes only; open the store with trajstore view for all.");
      }
      if (answer.error) throw new Problem(answer.kind, answer.error);
      return answer;
    },
    frame: async ({ stream, episode, path, step }) => {
      const kept = data.frames[keyOf("frame", { stream, episode, path })] || [];
      const found = kept.filter(([at]) => at <= step).pop();
      if (!found) throw new Problem("left_out", "this file has no frame of this step.");
      return { address: found[1], note: found[0] === step ? "" : `frame of step ${viewer.count(found[0])}` };
    },
  };

  function listed({ filter, sort, start, n }) {
    const { columns, rows } = data.table;
    const wanted = (filter || "").toLowerCase();
    let found = rows.filter((row) => !wanted || Object.values(row).some((v) => String(v).toLowerCase().includes(wanted)));
    if (sort) {
      const name = sort.replace(/^-/, "");
      const sign = sort === name ? 1 : -1;
      const rank = (value) => (value === null ? 1 : 0);
      found = [...found].sort((a, b) => {
        const [x, y] = [a[name], b[name]];
        return rank(x) - rank(y) || sign * (x < y ? -1 : x > y ? 1 : 0);
      });
    }
    return { n_episodes: data.table.n_episodes, n_found: found.length, start, columns, rows: found.slice(start, start + n) };
  }

  viewer.source = data ? file : live;
})();
