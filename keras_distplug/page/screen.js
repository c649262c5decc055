// The first screen: is the run alive, is it healthy, and what should be done.

const VERIFIED = { sizes: "sizes verified", "read back": "all bytes read back" };
// A shape for every level, so that no state is shown by color alone.
const SHAPES = { good: "\u25CF", done: "\u2713", warn: "\u25B2", bad: "\u2716", none: "\u25CB" };

function badge(run) {
  const level = run.status.level;
  const shape = element("span", { "aria-hidden": "true" }, SHAPES[level]);
  return element("span", { class: `badge ${level}`, "data-state": run.state }, shape, ` ${run.state}`);
}

function card(name, value, ...notes) {
  const small = notes.filter(isKnown).length ? [element("small", {}, ...notes.filter(isKnown))] : [];
  const content = Array.isArray(value) ? value : [value];
  return element("div", {}, element("dt", {}, name), element("dd", {}, ...content, ...small));
}

function heard(status) {
  if (!isKnown(status.heard_at)) return "no worker has reported yet";
  return element("span", { class: `heard ${status.heard_level}` }, "last heard ", age(status.heard_at));
}

function speed(run) {
  const progress = run.status.progress;
  if (!isKnown(progress.speed)) return card("speed", "not known");
  if (!run.status.is_training) return card("speed", `${significant(progress.speed, 3)} steps/s`, "when it last trained");
  const ratio = progress.relative_speed;
  const change = isKnown(ratio) && (ratio < 0.95 || ratio > 1.05);
  const past = isKnown(ratio) && (change ? `${Math.round(100 * ratio)} % of usual` : "as usual");
  return card("speed", `${significant(progress.speed, 3)} steps/s`, past || undefined);
}

function lastCheckpoint(run) {
  const [last, newer] = [run.last_checkpoint, run.newer_checkpoint];
  if (!last && !newer) return card("last checkpoint", "none");
  const shown = newer || last;
  const state = newer ? "not verified" : VERIFIED[last.verified];
  const before = newer && last ? `; step ${count(last.step)}: ${VERIFIED[last.verified]}` : "";
  return card("last checkpoint", `step ${count(shown.step)}`, age(shown.at), `, ${state}${before}`);
}

function cards(run) {
  const progress = run.status.progress;
  const of = (whole) => (isKnown(whole) ? ` of ${count(whole)}` : "");
  const lately = Object.entries(run.goodput_lately).filter(([, share]) => isKnown(share));
  const left = run.status.has_ended || !isKnown(progress.left_secs) ? (run.state === "finished" ? "none" : "not known") : duration(progress.left_secs);
  const done = isKnown(progress.steps) && progress.steps > 0 ? `${Math.floor((100 * progress.step) / progress.steps)} %` : undefined;
  const validation = isKnown(progress.logs.val_loss) ? `validation ${significant(progress.logs.val_loss)}` : undefined;
  return element(
    "dl", { class: "cards" },
    card("step", `${count(progress.step)}${of(progress.steps)}`, done),
    card("epoch", isKnown(progress.epoch) ? `${count(progress.epoch)}${of(progress.epochs)}` : "not known"),
    speed(run),
    card("time left", left),
    card("loss", significant(progress.loss), validation),
    card("goodput", percent(run.goodput), lately.length ? lately.map(([minutes, share]) => `${minutes} min: ${percent(share)}`).slice(-2).join(", ") : undefined),
    lastCheckpoint(run),
    card("attempts", count(run.attempted)),
  );
}

function command(text) {
  return element("code", { class: "command" }, text);
}

// The questions of somebody who has just been paged, always in the same place.
function answers(run) {
  const status = run.status;
  const since = isKnown(status.since) ? [`${clockTime(status.since)} UTC, `, age(status.since)] : ["not known"];
  const newest = run.newer_checkpoint || run.last_checkpoint;
  const safe = !newest
    ? ["no: there is no checkpoint"]
    : run.last_checkpoint
      ? [`yes: step ${count(run.last_checkpoint.step)}, `, age(run.last_checkpoint.at), `, ${VERIFIED[run.last_checkpoint.verified]}`]
      : [`step ${count(newest.step)}, `, age(newest.at), ", committed, not verified"];
  const next = [status.advice, ...(status.command ? [" ", command(status.command)] : [])];
  const rows = [
    ["worker", [status.where.join(", ") || "none stands out"]],
    ["since", since], ["lost", [status.lost]], ["checkpoint safe", safe],
    ["recovers on its own", [status.recovery]], ["slow", [status.slow]], ["next", next],
  ];
  return element("dl", { class: "answers" }, ...rows.map(([name, value]) => element("div", { "data-question": name }, element("dt", {}, name), element("dd", {}, ...value))));
}

function screen(run) {
  const status = run.status;
  const banner = element("header", { class: `banner ${status.level}` }, badge(run), element("span", { class: "cause" }, status.cause), heard(status));
  return element("div", { class: "screen" }, banner, cards(run), answers(run));
}

function times(group) {
  return group.count === 1 ? "" : `, ${count(group.count)} times`;
}

function incident(group) {
  const replicas = group.replicas.length ? `, ${group.replicas.length > 1 ? "replicas" : "replica"} ${group.replicas.join(", ")}` : "";
  const title = element("strong", {}, `${group.title}${times(group)}${replicas}`);
  const over = isKnown(group.over_at) ? [" ", element("span", { class: "over" }, "over")] : [];
  const isSaid = group.what.includes(`batch ${group.batch + 1}:`);
  const place = isKnown(group.batch) && !isSaid ? `epoch ${group.epoch + 1}, batch ${group.batch + 1}; ` : "";
  const first = group.count > 1 ? [element("div", { class: "quiet" }, `first ${clockTime(group.first_at)}`)] : [];
  const what = element("div", { class: "quiet" }, `${place}${group.what}`);
  const advice = group.advice ? [element("div", {}, group.advice)] : [element("div", {}, "Nothing to do: it is over.")];
  if (group.command) advice.push(command(group.command));
  return [[age(group.last_at), element("div", { class: "quiet" }, clockTime(group.last_at)), ...first], [title, ...over, what], group.where.join(", "), advice];
}

const FIRST_INCIDENTS = 5;

function incidents(run) {
  if (!run.incidents.length) return section("Incidents", element("p", {}, "none"));
  const columns = [["last (UTC)", "when"], ["what happened", "what"], ["where", "what"], ["what to do", "what"]];
  const shown = run.incidents.slice(0, FIRST_INCIDENTS);
  const rest = run.incidents.slice(FIRST_INCIDENTS);
  const made = section("Incidents", element("div", { class: "incidents" }, table("Incidents, newest first, equal ones grouped", columns, shown.map(incident))));
  if (rest.length) {
    const summary = element("summary", { "data-key": "older incidents" }, `${rest.length} older`);
    made.append(element("details", { class: "incidents" }, summary, table("Older incidents", columns, rest.map(incident))));
  }
  return made;
}

function bar(share) {
  const made = drawn("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  made.append(drawn("rect", { class: "whole", width: 100, height: 10 }));
  made.append(drawn("rect", { class: "goodput", width: 100 * (share || 0), height: 10 }));
  return made;
}

// All runs, one below the other. `choose` is called with the name of the run to show.
function overview(rows, name, choose) {
  const lines = rows.map((run) => {
    const button = element("button", { type: "button", "aria-pressed": String(run.name === name), "data-key": `run ${run.name}` }, run.name || "run");
    button.addEventListener("click", () => choose(run.name));
    if (run.error) return [button, `cannot be shown: ${run.error}`, "", "", "", "", ""];
    const last = run.last_checkpoint || run.newer_checkpoint;
    const what = last && `step ${count(last.step)}, ${VERIFIED[last.verified] || "not verified"}`;
    const share = element("span", { class: "share" }, bar(run.goodput), percent(run.goodput));
    return [button, badge(run), share, count(run.step), count(run.attempted), what || "none", last ? age(last.at) : ""];
  });
  const columns = [
    ["run", "run"], ["state", ""], ["goodput", "number"], ["step", "number"], ["attempts", "number"],
    ["last checkpoint", ""], ["age", "number"],
  ];
  return section("Runs", table("All runs; a button shows the run below", columns, lines));
}
