"use strict";

// Colours of Okabe and Ito, which people with any colour vision can tell apart; and hatchings,
// so that nothing is told by colour alone.
const CATEGORIES = [
  ["step", "#009e73", null, "updates, each for the first time"],
  ["input", "#e69f00", "/", "steps that wait for data"],
  ["sync", "#56b4e9", "\\", "steps that wait for other replicas, and for the sum of gradients"],
  ["save", "#f0e442", "-", "training stands still for a checkpoint"],
  ["evaluation", "#0072b2", null, "validation"],
  ["restore", "#cc79a7", "-", "reading a checkpoint"],
  ["start_up", "#999999", "/", "processes, up to their first step"],
  ["redone", "#d55e00", "\\", "steps that an earlier attempt had trained already"],
  ["recovery", "#7f0000", "/", "from what is known last of an attempt to the next one's start"],
  ["other", "#666677", "-", "callbacks, the ends of epochs and processes, nobody training"],
];
const VERIFIED = { sizes: "sizes verified", "read back": "read back" };
const HEAT = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]; // viridis
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const chosen = {}; // of the heat-map, by run: which buttons stay pressed
let serial = 0;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const WAITS = { input: "waiting for data", sync: "waiting for other replicas" };
const percent = (share) => (share === null ? "not known" : `${(100 * share).toFixed(1)} %`);
const milliseconds = (value) => (value === null ? "not known" : value);

function duration(secs) {
  if (secs < 60) return `${secs.toFixed(1)} s`;
  const whole = Math.round(secs);
  const minutes = whole < 3600 ? Math.floor(whole / 60) : Math.round(secs / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${String(hours % 24).padStart(2, "0")} h`;
}

// How long something is ago changes while nothing else does: `tell` writes it.
const age = (at) => element("span", { "data-at": at });

function tell(main, now) {
  for (const each of main.querySelectorAll("[data-at]")) {
    const text = `${duration(Math.max(now - Number(each.dataset.at), 0))} ago`;
    if (each.textContent !== text) each.textContent = text;
  }
}

const moment = (at) => new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ");

function bytes(count) {
  let unit = 0;
  for (; count >= 999.5 && unit < 4; unit += 1) count /= 1000;
  return `${unit ? Number(count.toPrecision(3)) : count} ${["B", "KB", "MB", "GB", "TB"][unit]}`;
}

function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => element("th", { scope: "col", class: kind }, name));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((cell, at) => element("td", { class: columns[at][1] }, cell instanceof Node ? cell : String(cell)))),
  );
  const made = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
  if (caption) made.prepend(element("caption", {}, caption));
  const named = { tabindex: "0", role: "region", "aria-label": caption, "data-key": `table ${caption}` };
  return element("div", { class: "scroll", ...named }, made);
}

function section(name, ...children) {
  const id = `s${(serial += 1)}`;
  return element("section", { "aria-labelledby": id }, element("h2", { id }, name), ...children);
}

function card(name, isText, ...value) {
  return element("div", {}, element("dt", {}, name), element("dd", isText ? { class: "text" } : {}, ...value));
}

function headline(run) {
  const cards = [card("goodput", false, percent(run.goodput))];
  for (const [minutes, share] of Object.entries(run.goodput_lately)) {
    cards.push(card(`last ${minutes} min`, false, percent(share)));
  }
  cards.push(card("step", false, String(run.step)), card("attempts", false, String(run.attempted)));
  const [last, newer] = [run.last_checkpoint, run.newer_checkpoint];
  const told = last ? [`step ${last.step}, `, age(last.at), ` (${VERIFIED[last.verified]})`] : ["none"];
  if (newer) told.push(`; not verified: step ${newer.step}, `, age(newer.at));
  cards.push(card("last verified checkpoint", true, ...told), card("state", true, run.state));
  return element("dl", { class: "cards" }, ...cards);
}

function bar(share) {
  const made = drawn("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  made.append(drawn("rect", { class: "whole", width: 100, height: 10 }));
  made.append(drawn("rect", { width: 100 * (share || 0), height: 10, fill: CATEGORIES[0][1] }));
  return made;
}

// All runs, one below the other. `choose` is called with the name of the one to show.
function overview(rows, name, choose) {
  const lines = rows.map((run) => {
    const button = element("button", { type: "button", "aria-pressed": String(run.name === name), "data-key": `run ${run.name}` }, run.name || "run");
    button.addEventListener("click", () => choose(run.name));
    if (run.error) return [button, `cannot be shown: ${run.error}`, "", "", "", "", ""];
    const last = run.last_checkpoint || run.newer_checkpoint;
    const what = last && `step ${last.step}, ${VERIFIED[last.verified] || "not verified"}`;
    const share = element("span", { class: "share" }, bar(run.goodput), percent(run.goodput));
    return [button, run.state, share, run.step, run.attempted, what || "none", last ? age(last.at) : ""];
  });
  const columns = [
    ["run", "run"], ["state", "what"], ["goodput", "number"], ["steps", "number"], ["attempts", "number"],
    ["last checkpoint", ""], ["made", "number"],
  ];
  return section("Runs", table("All runs; a button shows the run below", columns, lines));
}

function axis(run, height) {
  const made = drawn("g");
  const total = run.end - run.begin;
  for (let tick = 0; tick <= 5; tick += 1) {
    const x = (WIDTH * tick) / 5;
    const anchor = tick === 0 ? "start" : tick === 5 ? "end" : "middle";
    made.append(drawn("text", { x, y: height + 14, "text-anchor": anchor }, duration((total * tick) / 5)));
  }
  return made;
}

function hatching(id, colour, kind) {
  const made = drawn("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
  made.append(drawn("rect", { width: 8, height: 8, fill: colour }));
  const lines = { "/": "M0 8L8 0", "\\": "M0 0L8 8", "-": "M0 4L8 4" };
  made.append(drawn("path", { d: lines[kind], stroke: "rgba(0,0,0,0.45)", "stroke-width": 1.2 }));
  return made;
}

function fills() {
  const prefix = `f${(serial += 1)}`;
  const definitions = drawn("defs");
  const fill = {};
  for (const [name, colour, kind] of CATEGORIES) {
    fill[name] = kind ? `url(#${prefix}-${name})` : colour;
    if (kind) definitions.append(hatching(`${prefix}-${name}`, colour, kind));
  }
  return [definitions, fill];
}

function area(run) {
  if (!Object.keys(run.area.shares).length) {
    return section("Where the time went", element("p", {}, "Nothing is known of its time yet."));
  }
  const height = 200;
  const total = Object.values(run.secs).reduce((sum, secs) => sum + secs, 0);
  const [definitions, fill] = fills();
  const label = `Shares of time: ${CATEGORIES.filter(([name]) => run.secs[name])
    .map(([name]) => `${name} ${percent(run.secs[name] / total)}`).join(", ")}`;
  const chart = drawn("svg", { viewBox: `0 0 ${WIDTH} ${height + 20}`, role: "img", "aria-label": label }, definitions);
  const count = Math.max(...Object.values(run.area.shares).map((each) => each.length), 1);
  const below = new Array(count).fill(0);
  for (const [name, , , what] of CATEGORIES) {
    const shares = run.area.shares[name];
    if (!shares) continue;
    let top = "";
    let bottom = "";
    shares.forEach((share, at) => {
      const [left, right] = [(WIDTH * at) / count, (WIDTH * (at + 1)) / count];
      const [low, high] = [below[at], below[at] + share].map((each) => height * (1 - each));
      top += `L${left} ${high}L${right} ${high}`;
      bottom = `L${right} ${low}L${left} ${low}${bottom}`;
      below[at] += share;
    });
    const path = drawn("path", { d: `M${top.slice(1)}${bottom}Z`, fill: fill[name], "data-category": name });
    path.append(drawn("title", {}, `${name}: ${what}`));
    chart.append(path);
  }
  chart.append(axis(run, height));
  const items = CATEGORIES.filter(([name]) => run.secs[name]).map(([name, , , what]) => {
    const [own, colours] = fills();
    const sample = drawn("svg", { viewBox: "0 0 16 12", "aria-hidden": "true" }, own);
    sample.append(drawn("rect", { width: 16, height: 12, fill: colours[name] }));
    const share = `${name} ${percent(run.secs[name] / total)} (${duration(run.secs[name])})`;
    return element("li", { title: what, "data-category": name }, sample, share);
  });
  const notes = Object.entries(run.unknown_waits).map(([name, secs]) => element("p", { "data-unknown": name },
    `Of ${duration(secs)} of updates it is not known how much was ${WAITS[name]}; it counts as updates.`));
  return section("Where the time went", chart, element("ul", { class: "legend" }, ...items), ...notes);
}

function attempts(run) {
  const row = 22;
  const height = row * run.attempts.length;
  // Workers may be heard of a little before and behind what the charts show: the chief's time.
  const scale = (at) => WIDTH * Math.min(Math.max((at - run.begin) / Math.max(run.end - run.begin, 1e-9), 0), 1);
  const chart = drawn("svg", { viewBox: `0 0 ${WIDTH} ${height + 20}`, role: "img", "aria-label": "Attempts; the table below says the same" });
  run.attempts.forEach((each, at) => {
    const [x, end] = [scale(each.begin), scale(each.end)];
    const isGood = each.cause === "finished";
    const fill = isGood ? "#009e73" : each.cause === null ? "#56b4e9" : "#d55e00";
    const bar = drawn("rect", { x, y: row * at + 3, width: Math.max(end - x, 2), height: row - 6, fill, rx: 3 });
    bar.append(drawn("title", {}, `attempt ${each.number}: ${each.cause || "not known"}`));
    const isRight = end > WIDTH / 2;
    const text = `${each.number}: ${each.cause || "not known"}`.slice(0, 70);
    const place = isRight ? { x: x - 6, "text-anchor": "end" } : { x: end + 6, "text-anchor": "start" };
    const fits = !isRight || x > 60;
    chart.append(bar);
    if (fits) chart.append(drawn("text", { ...place, y: row * at + 15 }, text));
  });
  chart.append(axis(run, height));
  const rows = [...run.attempts].reverse().map((each) => [
    each.number, moment(each.begin), duration(each.end - each.begin), each.workers,
    `${each.first_step} to ${each.last_step}`, each.lost_steps,
    each.exit_code === null ? "" : each.exit_code, each.cause || "not known",
  ]);
  const columns = [
    ["attempt", "number"], ["begun (UTC)", ""], ["time", "number"], ["workers", "number"], ["steps", "number"],
    ["lost steps", "number"], ["exit code", "number"], ["end", "what"],
  ];
  return section("Attempts", chart, table("Attempts, the newest first", columns, rows));
}

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1);
  const low = Math.min(Math.floor(at), HEAT.length - 2);
  const parts = [0, 1, 2].map((part) => {
    const [a, b] = [HEAT[low], HEAT[low + 1]].map((each) => parseInt(each.slice(1 + 2 * part, 3 + 2 * part), 16));
    return Math.round(a + (b - a) * (at - low));
  });
  return `rgb(${parts.join(",")})`;
}

function heat(run) {
  const kinds = Object.keys(run.heat.milliseconds);
  if (!kinds.length) return section("Replicas over time", element("p", {}, "No times of replicas are known."));
  const holder = element("div");
  const buttons = kinds.map((kind) =>
    element("button", { type: "button", "aria-pressed": "false", "data-kind": kind, "data-key": `heat ${kind}` }, kind),
  );
  const [left, row] = [190, Math.max(12, Math.min(22, 400 / run.heat.rows.length))];
  const show = (kind) => {
    chosen[run.name] = kind;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    const cells = run.heat.milliseconds[kind];
    const values = cells.flat().filter((each) => each !== null).sort((a, b) => a - b);
    const most = values[Math.floor(0.98 * (values.length - 1))] || 1; // one slow first step tells nothing
    const height = row * cells.length;
    const label = `${kind} of each replica, in ms; dark is fast, bright is slow`;
    const chart = drawn("svg", { class: "heat", viewBox: `0 0 ${WIDTH} ${height + 20}`, role: "img", "aria-label": label });
    const end = drawn("text", { x: WIDTH, y: height + 14, "text-anchor": "end" }, duration(run.end - run.begin));
    chart.append(drawn("text", { x: left, y: height + 14 }, "0.0 s"), end);
    cells.forEach((each, at) => {
      const { replica, where } = run.heat.rows[at];
      const name = replica === null ? where : `${replica}: ${where}`;
      chart.append(drawn("text", { x: 0, y: row * (at + 0.5) + 4 }, name.length > 32 ? `${name.slice(0, 31)}…` : name));
      const width = (WIDTH - left) / each.length;
      for (let [from, to] = [0, 0]; from < each.length; from = to) {
        while (to < each.length && each[to] === each[from]) to += 1;
        const value = each[from];
        if (value === null) continue;
        const place = { x: left + width * from, y: row * at, width: width * (to - from) + 0.3, height: row - 1 };
        const cell = drawn("rect", { ...place, fill: colour(value / most) });
        cell.append(drawn("title", {}, `${name}: ${value} ms after ${duration(run.heat.width * from)}`));
        chart.append(cell);
      }
    });
    const scale = drawn("svg", { viewBox: "0 0 100 12", class: "scale", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (let at = 0; at < 50; at += 1) scale.append(drawn("rect", { x: 2 * at, width: 2.2, height: 12, fill: colour(at / 49) }));
    const told = `${most.toFixed(1)} ms and more (the 98th percentile)`;
    holder.replaceChildren(chart, element("p", { class: "key" }, "dark: 0 ms ", scale, ` bright: ${told}`));
  };
  for (const button of buttons) button.addEventListener("click", () => show(button.dataset.kind));
  show(kinds.includes(chosen[run.name]) ? chosen[run.name] : kinds[0]);
  const few = run.heat.rows.length < run.heat.replicas;
  const note = few ? [element("p", {}, `Of ${run.heat.replicas} replicas: all of them together, and the slowest ones.`)] : [];
  return section("Replicas over time", ...note, ...buttons, holder);
}

function ranking(run) {
  if (run.ranking.length < 2) return section("Stragglers", element("p", {}, "There are not several replicas whose times are known."));
  const rows = run.ranking.map((each) => [
    each.replica, each.where, each.compute_ms, milliseconds(each.input_ms), milliseconds(each.sync_ms), each.score, each.told.join(", "),
  ]);
  const columns = [
    ["replica", "number"], ["worker", ""], ["compute, ms", "number"], ["input, ms", "number"], ["sync, ms", "number"],
    ["median of the others / own", "number"], ["told of as a straggler for", ""],
  ];
  const what = "Own is compute and input, which others wait for, in the last steps; sync is what it waits for them.";
  return section("Stragglers", element("p", {}, what), table("Replicas of the last attempt, the slowest first", columns, rows));
}

function checkpoints(run) {
  const rows = [...run.checkpoints].reverse().map((each) => [
    each.step, moment(each.at), each.bytes === null ? "" : bytes(each.bytes), each.secs === null ? "" : duration(each.secs),
    each.stall_secs === null ? "" : `${(1000 * each.stall_secs).toFixed(1)} ms`, each.tier,
    each.state === "committed" && !each.verified ? "committed, not verified" : each.state, VERIFIED[each.verified] || "",
  ]);
  const columns = [
    ["step", "number"], ["made (UTC)", ""], ["size", "number"], ["took", "number"], ["training stood still", "number"],
    ["tier", ""], ["state", "what"], ["verified", ""],
  ];
  return section("Checkpoints", rows.length ? table("Checkpoints, the newest first", columns, rows) : element("p", {}, "none yet"));
}

function incidents(run) {
  const rows = [...run.incidents].reverse().map((each) => [
    moment(each.at), each.kind.replaceAll("_", " "), each.source, each.replicas.join(", "),
    each.batch === null ? "" : `epoch ${each.epoch + 1}, batch ${each.batch + 1}`, each.variable || "", each.what,
  ]);
  const columns = [["at (UTC)", ""], ["kind", ""], ["told by", ""], ["replicas", "number"], ["where", ""], ["variable", "what"], ["what", "what"]];
  return section("Incidents", rows.length ? table("Incidents, the newest first", columns, rows) : element("p", {}, "none"));
}

function details(run) {
  const made = element("article", { "data-run": run.name }, element("h1", {}, run.name || "run"));
  if (run.error) {
    made.append(element("p", { class: "problem" }, `This run cannot be shown. ${run.error}`));
  } else if (!run.area) {
    made.append(element("p", {}, "It is being read."));
  } else {
    made.append(headline(run), ...(run.notes || []).map((note) => element("p", { class: "problem" }, note)));
    if (run.attempts.length) {
      made.append(area(run), attempts(run), heat(run), ranking(run), checkpoints(run), incidents(run));
    }
  }
  return made;
}

// The run that is shown if nobody has chosen: the one that was heard of last.
function newest(rows) {
  const known = rows.filter((run) => !run.error);
  return (known.length ? known : rows).reduce((a, b) => (b.end > a.end ? b : a)).name;
}

// `rows` are runs, of which `run` is shown whole, once all of it is there.
function render(main, rows, run, choose) {
  if (!rows.length) {
    const what = "There is no run here yet. The callback RunLog, which is among keras_distplug.defaults(), writes what is shown.";
    main.replaceChildren(element("p", {}, what));
    return;
  }
  const key = main.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = new Map([...main.querySelectorAll(".scroll")].map((each) => [each.dataset.key, [each.scrollLeft, each.scrollTop]]));
  main.replaceChildren(...(rows.length > 1 ? [overview(rows, run.name, choose)] : []), details(run));
  // Who goes through the page stays where they are when there is news.
  for (const each of main.querySelectorAll("[data-key]")) {
    if (scrolled.has(each.dataset.key)) [each.scrollLeft, each.scrollTop] = scrolled.get(each.dataset.key);
    if (each.dataset.key === key) each.focus({ preventScroll: true });
  }
}
