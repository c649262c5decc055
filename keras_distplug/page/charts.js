// Charts over time. All of them share one time axis, so that what happened at the same time is at
// the same place. Drawn at the width that there is, so that text keeps its size.

// The colors of Okabe and Ito, which readers with any color vision can tell apart. Only lost time
// is hatched.
const CATEGORIES = [
  ["step", "#009e73", false, "updates computed for the first time: goodput"],
  ["input", "#e69f00", false, "steps waiting for data"],
  ["sync", "#56b4e9", false, "steps waiting for other replicas and the all-reduce"],
  ["save", "#f0e442", false, "training paused for a checkpoint"],
  ["evaluation", "#0072b2", false, "validation"],
  ["restore", "#cc79a7", false, "reading a checkpoint"],
  ["redone", "#d55e00", true, "steps that make up for lost ones"],
  ["recovery", "#8c2d04", true, "from the last message of an attempt to the next start"],
  ["start_up", "#b4b4be", false, "processes, up to their first step"],
  ["other", "#7d7d8a", false, "callbacks, the end of epochs, time when nothing is running"],
];
const COLORS = Object.fromEntries(CATEGORIES.map(([name, color]) => [name, color]));
const HEAT = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]; // viridis
const WAITS = { input: "waiting for data", sync: "waiting for other replicas" };
const AXIS = 22;
const view = {}; // by run: what the reader has chosen, `range` of time and `kind` of the heat map

const gutter = (width) => (width < 600 ? 76 : 190);
const LETTER = 7.2; // pixels, about
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];

// Time since the start, for a tick: "5 min", "1 h 30".
function tickTime(secs) {
  if (secs < 60) return `${Number(secs.toPrecision(3))} s`;
  if (secs < 3600) return secs % 60 ? `${Math.floor(secs / 60)} min ${String(Math.round(secs % 60)).padStart(2, "0")}` : `${secs / 60} min`;
  if (secs < 172800) return secs % 3600 ? `${Math.floor(secs / 3600)} h ${String(Math.round((secs % 3600) / 60)).padStart(2, "0")}` : `${secs / 3600} h`;
  return `${Number((secs / 86400).toPrecision(3))} d`;
}

class TimeChart {
  // `draw(chart)` fills `chart.svg`; `read(at)` gives lines of text for the tooltip.
  constructor(run, label, height, draw, read) {
    Object.assign(this, { run, label, height, drawing: draw, read });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.holder = element("div", { class: "chart" }, this.tip);
    this.holder.style.height = `${height + AXIS}px`;
    this.holder.timeChart = this;
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => this.unpoint());
    this.holder.addEventListener("pointerdown", (event) => this.grab(event));
    this.holder.addEventListener("pointerup", (event) => this.release(event));
    this.holder.addEventListener("dblclick", () => zoom(this.run, null));
  }

  get range() {
    const { begin, end } = this.run;
    return (view[this.run.name] || {}).range || [begin, Math.max(end, begin + 1e-6)];
  }

  x(at) {
    const [from, to] = this.range;
    return this.left + ((this.width - this.left) * (at - from)) / (to - from);
  }

  clipped(at) {
    return Math.min(Math.max(this.x(at), this.left), this.width);
  }

  at(x) {
    const [from, to] = this.range;
    const share = (x - this.left) / (this.width - this.left);
    return from + (to - from) * Math.min(Math.max(share, 0), 1);
  }

  draw() {
    this.width = Math.max(this.holder.clientWidth || 1000, 200);
    this.left = gutter(this.width);
    const id = `c${(serial += 1)}`;
    const size = { width: this.width, height: this.height + AXIS };
    this.svg = drawn("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": this.label });
    this.plot = drawn("g", { "clip-path": `url(#${id})` });
    const clip = drawn("clipPath", { id }, drawn("rect", { x: this.left, y: 0, width: this.width - this.left, height: this.height }));
    this.svg.append(clip, this.plot);
    this.drawing(this);
    this.axis();
    this.line = drawn("line", { class: "pointer", y1: 0, y2: this.height, visibility: "hidden" });
    this.brush = drawn("rect", { class: "brush", y: 0, height: this.height, width: 0 });
    this.svg.append(this.line, this.brush);
    for (const old of this.holder.querySelectorAll(":scope > svg, :scope > canvas")) old.remove();
    this.holder.prepend(...(this.canvas ? [this.canvas] : []), this.svg);
  }

  axis() {
    const [from, to] = this.range;
    const ticks = Math.max(Math.min(Math.floor((this.width - this.left) / 110), 10), 2);
    const step = STEPS.find((each) => (to - from) / each <= ticks) || (to - from) / ticks;
    this.svg.append(drawn("line", { class: "rule", x1: this.left, x2: this.width, y1: this.height + 0.5, y2: this.height + 0.5 }));
    const begin = this.run.begin;
    for (let tick = Math.ceil((from - begin) / step) * step; tick <= to - begin; tick += step) {
      const x = this.x(begin + tick);
      const anchor = x < this.left + 25 ? "start" : x > this.width - 25 ? "end" : "middle";
      this.svg.append(drawn("line", { class: "rule", x1: x, x2: x, y1: this.height, y2: this.height + 4 }));
      this.svg.append(drawn("text", { x, y: this.height + 17, "text-anchor": anchor }, tick ? tickTime(tick) : `${clockTime(begin).slice(11, 16)} UTC`));
    }
  }

  name(y, text) {
    const letters = Math.floor(this.left / LETTER) - 1;
    const short = text.length > letters ? `${text.slice(0, letters - 1)}\u2026` : text;
    this.svg.append(drawn("text", { x: 0, y }, short, drawn("title", {}, text)));
  }

  place(event) {
    const x = event.clientX - this.holder.getBoundingClientRect().left;
    return Math.min(Math.max(x, this.left), this.width);
  }

  point(event) {
    const x = this.place(event);
    for (const [key, value] of Object.entries({ x1: x, x2: x, visibility: "visible" })) this.line.setAttribute(key, value);
    if (this.grabbed !== undefined) {
      this.brush.setAttribute("x", Math.min(x, this.grabbed));
      this.brush.setAttribute("width", Math.abs(x - this.grabbed));
    }
    const y = event.clientY - this.holder.getBoundingClientRect().top;
    const at = this.at(x);
    const heading = `${clockTime(at)} UTC, after ${duration(Math.max(at - this.run.begin, 0))}`;
    this.tip.replaceChildren(...[heading, ...this.read(at, y)].map((line) => element("div", {}, line)));
    this.tip.hidden = false;
    const isRight = x > this.width / 2;
    this.tip.style.left = isRight ? "" : `${x + 12}px`;
    this.tip.style.right = isRight ? `${this.width - x + 12}px` : "";
  }

  unpoint() {
    this.tip.hidden = true;
    this.line.setAttribute("visibility", "hidden");
  }

  grab(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    event.preventDefault();
    this.holder.setPointerCapture(event.pointerId);
    this.grabbed = this.place(event);
  }

  release(event) {
    if (this.grabbed === undefined) return;
    const [from, to] = [this.at(this.grabbed), this.at(this.place(event))].sort((a, b) => a - b);
    const pixels = Math.abs(this.place(event) - this.grabbed);
    this.grabbed = undefined;
    this.brush.setAttribute("width", 0);
    if (pixels > 5) zoom(this.run, [from, to]);
  }
}

function chartsIn(root) {
  return [...root.querySelectorAll(".chart")].map((each) => each.timeChart).filter(Boolean);
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.timeChart;
    if (Math.abs(entry.contentRect.width - chart.width) >= 1) chart.draw();
  }
});

function drawCharts(root) {
  resized.disconnect();
  for (const chart of chartsIn(root)) {
    chart.draw();
    resized.observe(chart.holder);
  }
}

function zoom(run, range) {
  (view[run.name] ||= {}).range = range;
  const article = document.querySelector("article");
  if (!article) return;
  for (const chart of chartsIn(article)) chart.draw();
  for (const button of article.querySelectorAll("[data-zoom]")) {
    button.setAttribute("aria-pressed", String(button.dataset.zoom === (range ? "" : "all")));
  }
}

// For readers without a mouse, too.
function zoomButtons(run) {
  const whole = run.end - run.begin;
  const choices = [["all", null], ["last hour", 3600], ["last 10 min", 600]].filter(([, secs]) => secs === null || secs < whole);
  const isZoomed = Boolean((view[run.name] || {}).range);
  const buttons = choices.map(([name, secs]) => {
    const made = element("button", { type: "button", "data-key": `zoom ${name}`, "data-zoom": secs === null ? "all" : name, "aria-pressed": String(secs === null && !isZoomed) }, name);
    made.addEventListener("click", () => {
      zoom(run, secs === null ? null : [run.end - secs, run.end]);
      for (const each of made.parentNode.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === made));
    });
    return made;
  });
  const hint = element("span", { class: "quiet" }, "Time: drag across a chart to zoom, double-click to reset.");
  return element("div", { class: "zoom" }, ...buttons, hint);
}

function hatching(id, color) {
  const made = drawn("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
  made.append(drawn("rect", { width: 6, height: 6, fill: color }));
  made.append(drawn("path", { d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", stroke: "rgba(255,255,255,0.55)", "stroke-width": 1.2 }));
  return made;
}

function fills() {
  const prefix = `f${(serial += 1)}`;
  const definitions = drawn("defs");
  const fill = {};
  for (const [name, color, isHatched] of CATEGORIES) {
    fill[name] = isHatched ? `url(#${prefix}-${name})` : color;
    if (isHatched) definitions.append(hatching(`${prefix}-${name}`, color));
  }
  return [definitions, fill];
}

function binAt(run, width, at, bins) {
  return Math.min(Math.max(Math.floor((at - run.begin) / width), 0), bins - 1);
}

function area(run) {
  if (!Object.keys(run.area.shares).length) return section("Where the time went", element("p", {}, "Nothing is known about its time yet."));
  const total = Object.values(run.secs).reduce((sum, secs) => sum + secs, 0);
  const present = CATEGORIES.filter(([name]) => run.secs[name]);
  const label = `Shares of time: ${present.map(([name]) => `${name} ${percent(run.secs[name] / total)}`).join(", ")}`;
  const bins = Math.max(...Object.values(run.area.shares).map((each) => each.length), 1);
  const draw = (chart) => {
    const [definitions, fill] = fills();
    chart.svg.prepend(definitions);
    const below = new Array(bins).fill(0);
    for (const [name] of CATEGORIES) {
      const shares = run.area.shares[name];
      if (!shares) continue;
      let [top, bottom] = ["", ""];
      shares.forEach((share, at) => {
        const [left, right] = [chart.x(run.begin + run.area.width * at), chart.x(run.begin + run.area.width * (at + 1))];
        const [low, high] = [below[at], below[at] + share].map((each) => chart.height * (1 - each));
        top += `L${left.toFixed(1)} ${high.toFixed(1)}L${right.toFixed(1)} ${high.toFixed(1)}`;
        bottom = `L${right.toFixed(1)} ${low.toFixed(1)}L${left.toFixed(1)} ${low.toFixed(1)}${bottom}`;
        below[at] += share;
      });
      chart.plot.append(drawn("path", { d: `M${top.slice(1)}${bottom}Z`, fill: fill[name], "data-category": name }));
    }
    for (const share of [0, 0.5, 1]) {
      const y = chart.height * (1 - share);
      chart.svg.append(drawn("text", { x: chart.left - 8, y: Math.min(Math.max(y + 4, 11), chart.height), "text-anchor": "end" }, `${100 * share} %`));
      if (share === 0.5) chart.plot.append(drawn("line", { class: "grid", x1: chart.left, x2: chart.width, y1: y, y2: y }));
    }
  };
  const read = (at) => {
    const bin = binAt(run, run.area.width, at, bins);
    return CATEGORIES.filter(([name]) => run.area.shares[name]?.[bin]).map(([name]) => `${name} ${percent(run.area.shares[name][bin])}`);
  };
  const items = present.map(([name, , , what]) => {
    const [own, colors] = fills();
    const sample = drawn("svg", { viewBox: "0 0 16 12", "aria-hidden": "true" }, own);
    sample.append(drawn("rect", { width: 16, height: 12, fill: colors[name] }));
    const share = `${name} ${percent(run.secs[name] / total)} (${duration(run.secs[name])})`;
    return element("li", { title: what, "data-category": name }, sample, share);
  });
  const notes = Object.entries(run.unknown_waits).map(([name, secs]) => element("p", { "data-unknown": name },
    `For ${duration(secs)} of steps it is not known how much was ${WAITS[name]}; they count as \u201Cstep\u201D.`));
  const heading = element("p", { class: "figure" }, element("strong", {}, percent(run.goodput)), " goodput: the share of time spent on updates computed for the first time (green)");
  return section("Where the time went", heading, new TimeChart(run, label, 180, draw, read).holder, element("ul", { class: "legend" }, ...items), ...notes);
}

// Where an attempt ended otherwise than by finishing: marked in the loss chart.
function deaths(run) {
  return run.attempts.filter((each, at) => each.cause !== "finished" && (each.cause !== null || at < run.attempts.length - 1));
}

function loss(run) {
  const curves = run.loss.flatMap((each) => [["loss", each.loss], ["val_loss", each.val_loss]].filter(([, points]) => points.length).map(([kind, points]) => ({ kind, points, attempt: each.attempt })));
  const name = "Loss across attempts";
  if (!curves.length) return section(name, element("p", {}, "No loss is known yet."));
  const draw = (chart) => {
    const [from, to] = chart.range;
    const within = curves.flatMap(({ points }) => points.filter(([at]) => at >= from && at <= to).map((each) => each[2]));
    const values = within.length ? within : curves.flatMap(({ points }) => points.map((each) => each[2]));
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const isLog = low > 0 && high / low > 30;
    const scale = isLog ? Math.log10 : (value) => value;
    [low, high] = [scale(low), scale(high)];
    if (high === low) [low, high] = [low - 0.5, high + 0.5];
    const y = (value) => 6 + (chart.height - 12) * (1 - (scale(value) - low) / (high - low));
    for (let tick = 0; tick <= 2; tick += 1) {
      const level = low + ((high - low) * tick) / 2;
      const at = 6 + (chart.height - 12) * (1 - tick / 2);
      chart.svg.append(drawn("text", { x: chart.left - 8, y: at + 4, "text-anchor": "end" }, significant(isLog ? 10 ** level : level, 3)));
      chart.plot.append(drawn("line", { class: "grid", x1: chart.left, x2: chart.width, y1: at, y2: at }));
    }
    for (const each of deaths(run)) {
      const x = chart.x(each.end);
      chart.plot.append(drawn("line", { class: "death", x1: x, x2: x, y1: 0, y2: chart.height }));
      chart.plot.append(drawn("text", { class: "death", x: x > chart.width - 20 ? x - 12 : x + 3, y: 12 }, "\u2716"));
    }
    for (const { kind, points, attempt } of curves) {
      const d = points.map(([at, , value], index) => `${index ? "L" : "M"}${chart.x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      chart.plot.append(drawn("path", { class: `curve ${kind}`, d, "data-attempt": attempt }));
      if (points.length < 40) for (const [at, , value] of points) chart.plot.append(drawn("circle", { class: `dot ${kind}`, cx: chart.x(at), cy: y(value), r: 2.5 }));
    }
  };
  const read = (at) => {
    const near = (kind) => curves.filter((each) => each.kind === kind).flatMap(({ points, attempt }) => points.map((each) => [Math.abs(each[0] - at), attempt, ...each])).reduce((a, b) => (a && a[0] <= b[0] ? a : b), null);
    const lines = ["loss", "val_loss"].map((kind) => [kind, near(kind)]).filter(([, each]) => each);
    const died = deaths(run).filter((each) => Math.abs(each.end - at) < (run.end - run.begin) / 100);
    return [...lines.map(([kind, each]) => `${kind} ${significant(each[4])} at step ${count(each[3])}, attempt ${each[1]}`), ...died.map((each) => `\u2716 ${each.cause || "ended, for an unknown reason"}`)];
  };
  const label = "Loss over time; crosses mark where an attempt ended";
  const sample = (kind) => drawn("svg", { viewBox: "0 0 16 12", "aria-hidden": "true" }, drawn("path", { class: `curve ${kind}`, d: "M0 6L16 6" }));
  const kinds = [...new Set(curves.map(({ kind }) => kind))];
  const legend = kinds.map((kind) => element("li", {}, sample(kind), kind === "loss" ? "loss (mean of the epoch so far)" : "validation loss"));
  if (deaths(run).length) legend.push(element("li", {}, element("span", { class: "death" }, "\u2716 "), "an attempt ended early"));
  return section(name, new TimeChart(run, label, 150, draw, read).holder, element("ul", { class: "legend" }, ...legend));
}

const OUTCOMES = { good: "#009e73", running: "#56b4e9", bad: "#d55e00" };

// A killed process has trained further than its log says.
function lostSteps(attempt) {
  if (attempt.lost_is_exact) return count(attempt.lost_steps);
  return attempt.lost_steps ? `at least ${count(attempt.lost_steps)}` : "not known";
}

function attempts(run) {
  const row = 24;
  const outcome = (each, at) => (each.cause === "finished" ? "good" : each.cause === null && at === run.attempts.length - 1 && !run.status.has_ended ? "running" : "bad");
  const shown = run.attempts.slice(-20);
  const first = run.attempts.length - shown.length;
  const text = (each, at) => each.cause || (outcome(each, first + at) === "running" ? "running" : "ended, for an unknown reason");
  const draw = (chart) => shown.forEach((each, at) => {
    const [x, end] = [chart.clipped(each.begin), chart.clipped(each.end)];
    const width = Math.max(Math.min(end - x, chart.width - x), 2);
    chart.plot.append(drawn("rect", { class: "attempt", x: Math.min(x, chart.width - width), y: row * at + 3, width, height: row - 6, fill: OUTCOMES[outcome(each, first + at)], rx: 3 }));
    chart.name(row * at + 16, `attempt ${each.number}`);
    // Beside the bar, where there is more room.
    const isRight = chart.width - end < x - chart.left;
    const room = Math.floor((isRight ? x - chart.left : chart.width - end) / LETTER) - 1;
    const what = `${outcome(each, first + at) === "bad" ? "\u2716 " : ""}${text(each, at)}`;
    if (room > 8) chart.svg.append(drawn("text", { x: isRight ? x - 6 : end + 6, y: row * at + 16, "text-anchor": isRight ? "end" : "start" }, what.length > room ? `${what.slice(0, room - 1)}\u2026` : what));
  });
  const read = (at, y) => {
    const index = Math.min(Math.max(Math.floor(y / row), 0), shown.length - 1);
    const each = shown[index];
    return [`attempt ${each.number}: ${text(each, index)}`, `steps ${count(each.first_step)} to ${count(each.last_step)}, lost: ${lostSteps(each)}`];
  };
  const rows = [...run.attempts].reverse().map((each, at) => [
    each.number, clockTime(each.begin), duration(each.end - each.begin), each.workers, `${count(each.first_step)} to ${count(each.last_step)}`,
    lostSteps(each), each.exit_code === null ? "" : each.exit_code, each.cause || (at === 0 && !run.status.has_ended ? "running" : "not known"),
  ]);
  const columns = [
    ["attempt", "number"], ["started (UTC)", ""], ["time", "number"], ["workers", "number"], ["steps", "number"],
    ["lost steps", "number"], ["exit code", "number"], ["ended because", "what"],
  ];
  const chart = new TimeChart(run, "Attempts; the table below has the same data", row * shown.length, draw, read);
  return section("Attempts", chart.holder, table("Attempts, newest first", columns, rows));
}

function heatColor(share) {
  const place = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1);
  const low = Math.min(Math.floor(place), HEAT.length - 2);
  const mixed = [1, 3, 5].map((at) => {
    const [a, b] = [HEAT[low], HEAT[low + 1]].map((each) => parseInt(each.slice(at, at + 2), 16));
    return Math.round(a + (b - a) * (place - low));
  });
  return `rgb(${mixed.join(", ")})`;
}

function heat(run) {
  const kinds = Object.keys(run.heat.milliseconds);
  if (!kinds.length) return section("Replicas over time", element("p", {}, "No times of replicas are known."));
  const row = Math.max(13, Math.min(22, 400 / run.heat.rows.length));
  const chosen = () => (kinds.includes((view[run.name] || {}).kind) ? view[run.name].kind : kinds[0]);
  const cells = () => run.heat.milliseconds[chosen()];
  const most = () => {
    const values = cells().flat().filter((each) => each !== null).sort((a, b) => a - b);
    const at = (share) => values[Math.floor(share * (values.length - 1))];
    return Math.max(at(0.98), 2 * at(0.5)) || 1; // one slow first step says nothing, and small differences neither
  };
  const name = ({ replica, where }) => (replica === null ? where : `${replica}: ${where}`);
  const draw = (chart) => {
    chart.label = `${chosen()} of every replica, in ms; dark is fast, bright is slow`;
    chart.svg.setAttribute("aria-label", chart.label);
    chart.svg.setAttribute("class", "heat");
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [chart.width - chart.left, chart.height];
    const canvas = (chart.canvas = element("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), "aria-hidden": "true" }));
    Object.assign(canvas.style, { left: `${chart.left}px`, width: `${width}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const largest = most();
    cells().forEach((each, at) => {
      const whole = name(run.heat.rows[at]);
      const isLong = whole.length > chart.left / LETTER - 1;
      chart.name(row * (at + 0.5) + 4, isLong ? whole.split(" on ")[0] : whole);
      each.forEach((value, bin) => {
        if (value === null) return;
        const [left, right] = [bin, bin + 1].map((edge) => chart.x(run.begin + run.heat.width * edge) - chart.left);
        if (right < 0 || left > width) return;
        pen.fillStyle = heatColor(value / largest);
        pen.fillRect(left, row * at, right - left + 0.5, row - 1);
      });
    });
  };
  const read = (at, y) => {
    const index = Math.min(Math.max(Math.floor(y / row), 0), run.heat.rows.length - 1);
    const bins = cells()[index];
    const value = bins[binAt(run, run.heat.width, at, bins.length)];
    return [name(run.heat.rows[index]), value === null ? "no data" : `${chosen()} ${significant(value, 3)} ms`];
  };
  const chart = new TimeChart(run, "", row * run.heat.rows.length, draw, read);
  const key = element("p", { class: "key" });
  const buttons = kinds.map((kind) => element("button", { type: "button", "aria-pressed": "false", "data-kind": kind, "data-key": `heat ${kind}` }, kind));
  const show = (kind) => {
    (view[run.name] ||= {}).kind = kind;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    const scale = drawn("svg", { viewBox: "0 0 100 12", class: "scale", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (let at = 0; at < 50; at += 1) scale.append(drawn("rect", { x: 2 * at, width: 2.2, height: 12, fill: heatColor(at / 49) }));
    key.replaceChildren("dark: 0 ms ", scale, ` bright: ${significant(most(), 3)} ms or more`);
    if (chart.holder.isConnected) chart.draw();
  };
  for (const button of buttons) button.addEventListener("click", () => show(button.dataset.kind));
  show(chosen());
  const few = run.heat.rows.length < run.heat.replicas;
  const note = few ? [element("p", {}, `${run.heat.replicas} replicas: all of them together, and the slowest ones.`)] : [];
  return section("Replicas over time", ...note, element("div", {}, ...buttons), chart.holder, key);
}

function ranking(run) {
  if (run.ranking.length < 2) return section("Stragglers", element("p", {}, "There are fewer than two replicas with known times."));
  const rows = run.ranking.map((each) => [
    each.replica, each.where, milliseconds(each.compute_ms), milliseconds(each.input_ms), milliseconds(each.sync_ms), each.score, each.told.join(", "),
  ]);
  const columns = [
    ["replica", "number"], ["worker", ""], ["compute, ms", "number"], ["input, ms", "number"], ["sync, ms", "number"],
    ["median of the others / own", "number"], ["reported as a straggler for", ""],
  ];
  const what = "Own time is compute plus input; sync is time spent waiting for other replicas (last windows).";
  return section("Stragglers", element("p", {}, what), table("Replicas of the last attempt, slowest first", columns, rows));
}

function checkpoints(run) {
  const rows = [...run.checkpoints].reverse().map((each) => [
    count(each.step), clockTime(each.at), each.bytes === null ? "" : bytes(each.bytes), each.secs === null ? "" : duration(each.secs),
    each.stall_secs === null ? "" : `${(1000 * each.stall_secs).toFixed(1)} ms`, each.tier,
    each.state === "committed" && !each.verified ? "committed, not verified" : each.state, VERIFIED[each.verified] || "",
  ]);
  const columns = [
    ["step", "number"], ["saved (UTC)", ""], ["size", "number"], ["took", "number"], ["training paused", "number"],
    ["tier", ""], ["state", "what"], ["verified", ""],
  ];
  return section("Checkpoints", rows.length ? table("Checkpoints, newest first", columns, rows) : element("p", {}, "none yet"));
}

function details(run) {
  const made = element("article", { "data-run": run.name }, element("h1", {}, run.name || "run"));
  if (run.error) {
    made.append(element("p", { class: "problem" }, `This run cannot be shown. ${run.error}`));
    return made;
  }
  made.append(screen(run));
  if (!run.area) {
    made.append(element("p", {}, "Reading the log\u2026"));
    return made;
  }
  made.append(...(run.notes || []).map((note) => element("p", { class: "problem" }, note)), incidents(run));
  if (run.attempts.length) {
    made.append(zoomButtons(run), element("div", { class: "sections" }, area(run), loss(run), attempts(run), heat(run), ranking(run), checkpoints(run)));
  }
  return made;
}

// The run that is shown if the reader has not chosen one: the one with the newest message.
function newest(rows) {
  const known = rows.filter((run) => !run.error);
  return (known.length ? known : rows).reduce((a, b) => (b.end > a.end ? b : a)).name;
}

// `rows` are runs, of which `run` is shown whole, once its details are known.
function render(main, rows, run, choose) {
  if (!rows.length) {
    const what = "There is no run here yet. The callback RunLog, one of keras_distplug.defaults(), writes what is shown.";
    main.replaceChildren(element("p", {}, what));
    return;
  }
  const key = main.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = new Map([...main.querySelectorAll(".scroll")].map((each) => [each.dataset.key, [each.scrollLeft, each.scrollTop]]));
  const opened = Boolean(main.querySelector("details[open]"));
  main.replaceChildren(...(rows.length > 1 ? [overview(rows, run.name, choose)] : []), details(run));
  const older = main.querySelector("details");
  if (older && opened) older.open = true;
  drawCharts(main);
  // A reader stays where they are when there is news.
  for (const each of main.querySelectorAll("[data-key]")) {
    if (scrolled.has(each.dataset.key)) [each.scrollLeft, each.scrollTop] = scrolled.get(each.dataset.key);
    if (each.dataset.key === key) each.focus({ preventScroll: true });
  }
}
