// Uses the tab as somebody does, and says what there was to see.
"use strict";

const frame = document.querySelector("iframe");
const said = {};

async function until(found) {
  for (;;) {
    const what = found();
    if (what) return what;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

const all = (selector) => [...frame.contentDocument.querySelectorAll(selector)];
const one = (selector) => all(selector)[0];
const article = (name) => one(`article[data-run="${name}"] .sections`)?.parentElement;
const cards = () => Object.fromEntries(all(".cards dt").map((each) => [each.textContent, each.nextSibling.firstChild.textContent]));
const step = () => cards().step.split(" ")[0].replaceAll(",", "");
const pressed = () => all('[aria-pressed="true"]').map((each) => each.dataset.key);
const ages = () => all("td [data-at]").map((each) => each.textContent);
const back = () => frame.contentWindow.getComputedStyle(frame.contentDocument.body).backgroundColor;
const problem = () => one('[role="status"]').textContent;

async function used() {
  await until(() => article("b"));
  // What moves without the reader's doing, from the first headline on.
  let shift = 0;
  const { PerformanceObserver } = frame.contentWindow;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) shift += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
  said.first = { rows: all("tbody").at(0).rows.length, pressed: pressed(), ages: ages() };
  said.asked = await (await fetch("asked")).json();

  one('[data-key="run a"]').click();
  await until(() => article("a"));
  one('[data-key="heat input"]').click();
  one('[data-key="heat input"]').focus();
  said.chosen = { pressed: pressed(), chart: one("svg.heat").getAttribute("aria-label"), step: step() };

  await fetch("news");
  await until(() => step() !== said.chosen.step);
  said.news = { pressed: pressed(), step: step(), focused: frame.contentDocument.activeElement.dataset.key };

  article("a").dataset.mark = "the same";
  await fetch("later");
  await until(() => ages()[0] !== said.first.ages[0]);
  said.later = { mark: article("a").dataset.mark, ages: ages(), card: one('[data-question="checkpoint safe"]').textContent };

  said.shift = shift;

  await fetch("break");
  said.problem = await until(problem);
  await fetch("mend");
  await until(() => !problem());

  said.light = [frame.contentDocument.documentElement.dataset.theme, back()];
  document.body.className = "dark-mode";
  await until(() => back() !== said.light[1]);
  said.dark = [frame.contentDocument.documentElement.dataset.theme, back()];
}

used().catch((error) => (said.error = String(error))).finally(() => {
  document.body.append(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(said) }));
});
