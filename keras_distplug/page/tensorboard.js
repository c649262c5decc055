
const EVERY_MS = 5000;

function followTheme() {
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

export async function tensorboardRender() {
  const main = element("main", { id: "distplug" });
  const problem = element("p", { role: "status" });
  document.head.append(element("style", {}, STYLE));
  document.body.append(problem, main);
  followTheme();
  let [isSeen, shown] = [true, null];
  new IntersectionObserver(([entry]) => (isSeen = entry.isIntersecting)).observe(document.body);
  const refresh = async () => {
    if (!isSeen && shown !== null) return;
    try {
      const answer = await fetch(new URL("runs", import.meta.url));
      const text = await answer.text();
      if (!answer.ok) throw new Error(`${answer.status}: ${text}`);
      problem.textContent = "";
      if (text === shown) return; // what somebody points at, or has chosen, stays
      render(main, JSON.parse(text));
      shown = text;
    } catch (error) {
      problem.textContent = `This is not up to date: ${error.message}`;
    }
  };
  await refresh();
  setInterval(refresh, EVERY_MS);
}

export { tensorboardRender as render };
