
// A file: all that it shows is in it.
const main = document.getElementById("distplug");
const { now, runs } = JSON.parse(document.getElementById("runs").textContent);

function choose(name) {
  render(main, runs, runs.find((run) => run.name === name), choose);
  tell(main, now);
}

choose(runs.length ? newest(runs) : null);
main.prepend(element("p", {}, `Written ${moment(now)} (UTC), as of which ages are told.`));
