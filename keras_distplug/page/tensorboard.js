
const EVERY_MS = 5000;

function followTheme() {
  if (window.parent === window) return; // by itself: what the system prefers
  // TensorBoard does not tell a frame its theme, but marks the page around it.
  let around = null;
  try {
    around = window.parent.document.body;
  } catch {
    return; // of another origin: what the system prefers
  }
  const follow = () => {
    document.documentElement.dataset.theme = around.classList.contains("dark-mode") ? "dark" : "light";
  };
  follow();
  new MutationObserver(follow).observe(around, { attributes: true, attributeFilter: ["class"] });
}

// Asks for what has changed since the answer before; without a text if nothing has.
async function asked(route, before) {
  const headers = before ? { "If-None-Match": before.version } : {};
  const answer = await fetch(new URL(route, import.meta.url), { headers });
  const now = Number(answer.headers.get("X-Now"));
  if (answer.status === 304) return { ...before, isNew: false, now };
  const text = await answer.text();
  if (!answer.ok) throw new Error(`${answer.status}: ${text}`);
  return { version: answer.headers.get("ETag"), found: JSON.parse(text), isNew: true, now };
}

class Shown {
  constructor(main, problem) {
    this.main = main;
    this.problem = problem;
    this.rows = this.run = this.name = null;
    this.clock = null; // the server's: a browser's may be another one
  }

  async refresh() {
    try {
      this.rows = await asked("runs", this.rows);
      this.clock = { now: this.rows.now, at: performance.now() };
      const rows = this.rows.found;
      if (rows.length && !rows.some((row) => row.name === this.name)) this.name = newest(rows);
      const row = rows.find((each) => each.name === this.name);
      const before = this.run;
      this.run = null;
      if (row && !row.error) {
        const isSame = before && before.name === this.name;
        this.run = await asked(`run?name=${encodeURIComponent(row.name)}`, isSame ? before : null);
        this.run.name = row.name;
      }
      // What somebody points at stays while there is no news.
      if (this.rows.isNew || this.run?.isNew || !this.main.hasChildNodes()) this.draw(this.run?.found || row);
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = `This is not up to date: ${error.message}`;
    }
    if (this.clock) tell(this.main, this.clock.now + (performance.now() - this.clock.at) / 1000);
  }

  draw(run) {
    render(this.main, this.rows.found, run, (name) => {
      this.name = name;
      this.draw(this.rows.found.find((row) => row.name === name));
      tell(this.main, this.clock.now);
      this.hurry();
    });
  }

  hurry() {
    this.isHurried = true;
    this.wake?.();
  }

  async pause() {
    if (!this.isHurried) {
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, EVERY_MS);
      });
    }
    this.isHurried = false;
  }
}

export async function tensorboardRender() {
  const main = element("main", { id: "distplug" });
  const problem = element("p", { role: "status", class: "problem" });
  document.head.append(element("style", {}, STYLE));
  document.body.append(problem, main);
  followTheme();
  const shown = new Shown(main, problem);
  let isSeen = true;
  new IntersectionObserver(([entry]) => {
    if (entry.isIntersecting && !isSeen) shown.hurry();
    isSeen = entry.isIntersecting;
  }).observe(document.body);
  await shown.refresh();
  (async () => {
    for (;;) {
      await shown.pause(); // counted from the answer, so that a slow server is asked once at a time
      if (isSeen) await shown.refresh();
    }
  })();
}

export { tensorboardRender as render };
