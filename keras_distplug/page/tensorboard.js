
const EVERY_MS = 2500; // so that a state is shown within 15 s of its start

function followTheme() {
  if (window.parent === window) return; // not in a frame: follow the system
  // TensorBoard marks its own page with the theme, and passes it to no frame.
  let around = null;
  try {
    around = window.parent.document.body;
  } catch {
    return; // another origin: follow the system
  }
  const follow = () => {
    document.documentElement.dataset.theme = around.classList.contains("dark-mode") ? "dark" : "light";
  };
  follow();
  new MutationObserver(follow).observe(around, { attributes: true, attributeFilter: ["class"] });
}

// Requests what has changed since the previous answer; the server sends no text if nothing has.
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
    this.clock = null; // the server's, because the browser's may differ
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
      // Without news nothing is drawn again, so that what the reader points at stays.
      if (this.rows.isNew || this.run?.isNew || !this.main.hasChildNodes()) this.draw(this.run?.found || row);
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = `This is not up to date: ${error.message}`;
    }
    if (this.clock) updateAges(this.main, this.clock.now + (performance.now() - this.clock.at) / 1000);
  }

  draw(run) {
    render(this.main, this.rows.found, run, (name) => {
      this.name = name;
      this.draw(this.rows.found.find((row) => row.name === name));
      updateAges(this.main, this.clock.now);
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
      await shown.pause(); // counted from the answer: a slow server has one request at a time
      if (isSeen) await shown.refresh();
    }
  })();
}

export { tensorboardRender as render };
