
// A file that contains everything it shows.
const main = document.getElementById("distplug");
const { now, runs } = JSON.parse(document.getElementById("runs").textContent);

function choose(name) {
  render(main, runs, runs.find((run) => run.name === name), choose);
  updateAges(main, now);
}

choose(runs.length ? newest(runs) : null);
main.prepend(element("p", {}, `Written at ${clockTime(now)} UTC; ages are as of then.`));
