"use strict";
// The table of episodes: filtered, sorted and paged by the server.
(() => {
  const PAGE = 50;
  const EXAMPLES = ["return > 100 and end == terminated", "50 <= length < 500", "metadata.seed in (3, 7)"];
  const NUMBERS = new Set(["episode", "env", "length", "return"]);
  const isDownwards = (name) => (NUMBERS.has(name) && name !== "episode") || name === "time"; // the greatest first
  const HEADINGS = { is_headless: "headless", has_final: "final" };

  viewer.episodesPage = (parameters) => {
    const asked = {
      filter: parameters.filter || "",
      sort: parameters.sort || "", // with "-" before it: downwards
      start: Math.max(0, Number(parameters.start) || 0),
    };
    const input = viewer.h("input", {
      type: "search",
      id: "filter",
      value: asked.filter,
      spellcheck: "false",
      autocomplete: "off",
      "aria-describedby": "filter-problem",
      placeholder: viewer.exported ? "text in any column" : "return > 100 and end == terminated",
    });
    const problem = viewer.h("div", { id: "filter-problem", role: "alert" });
    const found = viewer.h("p", { class: "quiet found", role: "status" });
    const head = viewer.h("thead");
    const body = viewer.h("tbody");
    const table = viewer.h("table", { class: "episodes" }, viewer.h("caption", { class: "sr" }, "Episodes"), head, body);
    const pager = viewer.h("nav", { class: "pager", "aria-label": "Pages of episodes" });
    const go = (changes) => viewer.go("episodes", { ...asked, start: 0, ...changes });

    const form = viewer.h(
      "form",
      { class: "filter", role: "search", onsubmit: (event) => { event.preventDefault(); go({ filter: input.value.trim() }); } },
      viewer.h("label", { for: "filter" }, "Filter"),
      input,
      viewer.h("button", { type: "submit" }, "Apply"),
      asked.filter ? viewer.h("button", { type: "button", class: "plain", onclick: () => go({ filter: "" }) }, "Clear") : "",
    );

    const examples = viewer.exported ? "" : viewer.h("p", { class: "hint" }, "For example ", EXAMPLES.map((text) => viewer.h("button", { type: "button", onclick: () => { input.value = text; input.focus(); } }, text)));

    const update = async () => {
      let answer;
      try {
        answer = await viewer.source.ask("episodes", { ...asked, n: PAGE });
      } catch (error) {
        if (error.kind !== "question") {
          viewer.replace(body);
          viewer.replace(found);
        }
        viewer.replace(problem, viewer.problem(error));
        card.hidden = !body.children.length;
        return;
      }
      viewer.replace(problem, Object.entries(answer.damaged || {}).map(([name, said]) => viewer.problem(new viewer.Problem("damaged", `column ${name}: ${said}`))));
      const { columns, rows, n_episodes: n, n_found: nFound } = answer;
      viewer.replace(found, asked.filter ? `${viewer.count(nFound)} of ${viewer.plural(n, "episode")}` : viewer.plural(n, "episode"), viewer.exported && viewer.exported.table.rows.length < n ? `; this file lists ${viewer.count(viewer.exported.table.rows.length)}` : "");
      const shown = columns.filter((name) => !isConstant(name, rows));
      for (const name of shown) if (name !== "time" && rows.some((row) => typeof row[name] === "number")) kinds[name] = "number";
      const formats = Object.fromEntries(shown.map((name) => [name, viewer.numbers(rows.map((row) => row[name]))]));
      viewer.replace(head, viewer.h("tr", {}, shown.map(heading)));
      const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      viewer.replace(body, rows.map((row) => episodeRow(row, shown, formats)));
      if (!rows.length) viewer.replace(body, viewer.h("tr", {}, viewer.h("td", { class: "quiet", colspan: shown.length }, asked.filter ? "No episode matches the filter." : "No episodes yet.")));
      if (focused) for (const link of body.querySelectorAll("a")) if (link.getAttribute("href") === focused) link.focus();
      drawPager(nFound);
      card.hidden = false;
    };

    const heading = (name) => {
      // A click sorts, the next one turns the order round, the third restores the order of the table.
      const orders = isDownwards(name) ? [`-${name}`, name, ""] : [name, `-${name}`, ""];
      const next = { sort: orders[(orders.indexOf(asked.sort) + 1) % 3] };
      const direction = { [name]: "ascending", [`-${name}`]: "descending" }[asked.sort] || "none";
      const arrow = direction === "none" ? "" : viewer.h("span", { class: "arrow", "aria-hidden": "true" }, direction === "descending" ? "↓" : "↑");
      const button = viewer.h("button", { type: "button", onclick: () => go(next), "data-column": name }, HEADINGS[name] || name, arrow);
      return viewer.h("th", { scope: "col", class: isNumeric(name) ? "number" : "", "aria-sort": direction }, button);
    };

    const kinds = {};
    const isNumeric = (name) => NUMBERS.has(name) || kinds[name] === "number";
    const episodeRow = (row, shown, formats) => {
      const address = viewer.address("episode", { stream: row.stream, episode: row.episode });
      const cells = shown.map((name, i) => {
        const content = cell(name, row, formats[name]);
        return viewer.h("td", { class: isNumeric(name) ? "number" : "" }, i === 0 ? viewer.h("a", { href: address }, content) : content);
      });
      return viewer.h("tr", { onclick: (event) => { if (!event.target.closest("a") && !String(getSelection())) location.hash = address; } }, cells);
    };

    const drawPager = (n) => {
      const { start } = asked;
      const last = Math.max(0, Math.floor((n - 1) / PAGE) * PAGE);
      const step = (to, text, label) => viewer.h("button", { type: "button", "aria-label": label, disabled: to < 0 || to > last || to === start, onclick: () => go({ start: to }) }, text);
      const where = n ? `${viewer.count(Math.min(start + 1, n))} to ${viewer.count(Math.min(start + PAGE, n))} of ${viewer.count(n)}` : "";
      viewer.replace(pager, step(0, "«", "First page"), step(start - PAGE, "‹", "Previous page"), viewer.h("span", {}, where), step(start + PAGE, "›", "Next page"), step(last, "»", "Last page"));
    };

    const card = viewer.h("div", { class: "scroll card" }, table);
    const element = viewer.h(
      "div",
      { class: "list" },
      viewer.h("h1", {}, "Episodes"),
      form,
      examples,
      problem,
      found,
      card,
      pager,
    );
    const onKey = (event) => {
      if (event.key === "/" ) {
        input.focus();
        input.select();
        return true;
      }
      if (event.key === "ArrowDown" || event.key === "ArrowUp") return moveRow(body, event.key === "ArrowDown" ? 1 : -1);
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        const button = pager.children[event.key === "ArrowRight" ? 3 : 1];
        if (button && !button.disabled) button.click();
        return true;
      }
      return false;
    };
    return { element, title: "Episodes", update, onKey };
  };

  function moveRow(body, step) {
    const links = [...body.querySelectorAll("tr td:first-child a")];
    const at = links.indexOf(document.activeElement);
    const next = links[at < 0 ? (step > 0 ? 0 : links.length - 1) : at + step];
    if (next) next.focus();
    return true;
  }

  // Columns that say nothing on this page are left out: every row of `is_headless` is false in most stores.
  function isConstant(name, rows) {
    return ["is_headless", "has_final", "env"].includes(name) && rows.every((row) => row[name] === rows[0][name]);
  }

  function cell(name, row, format) {
    const value = row[name];
    if (name === "stream") return viewer.h("span", { title: value }, viewer.shortId(value));
    if (name === "end") return viewer.h("span", { class: "end" }, viewer.h("span", { class: `dot ${viewer.endColour(value)}` }), value);
    if (name === "time") return viewer.h("time", { title: viewer.fullDate(value) }, viewer.date(value));
    if (value === null || value === undefined) return viewer.h("span", { class: "quiet" }, "–");
    if (typeof value === "boolean") return value ? "yes" : "no";
    return typeof value === "number" ? format(value) : clipped(String(value));
  }

  function clipped(text) {
    return text.length > 60 ? viewer.h("span", { title: text.slice(0, 500) }, `${text.slice(0, 60)}…`) : text;
  }
})();
