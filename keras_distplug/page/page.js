"use strict";

// Elements, numbers and tables: what the other files build the page from.

const SVG = "http://www.w3.org/2000/svg";
let serial = 0;

function build(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const element = (name, attributes = {}, ...children) => build(document.createElement(name), attributes, children);
const drawn = (name, attributes = {}, ...children) => build(document.createElementNS(SVG, name), attributes, children);

const isKnown = (value) => value !== null && value !== undefined;
const count = (value) => (isKnown(value) ? Math.round(value).toLocaleString("en-US") : "");
const percent = (share) => (isKnown(share) ? `${(100 * share).toFixed(1)} %` : "not known");
const significant = (value, digits = 4) => (isKnown(value) ? String(Number(value.toPrecision(digits))) : "not known");
const milliseconds = (value) => (isKnown(value) ? significant(value) : "not known");
const clockTime = (at) => new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ");

function duration(secs) {
  if (secs < 60) return `${secs.toFixed(1)} s`;
  const whole = Math.round(secs);
  const minutes = whole < 3600 ? Math.floor(whole / 60) : Math.round(secs / 60);
  if (minutes < 60) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${String(hours % 24).padStart(2, "0")} h`;
}

function ago(secs) {
  return `${secs < 120 ? `${Math.round(secs)} s` : duration(secs)} ago`;
}

function bytes(size) {
  let unit = 0;
  for (; size >= 999.5 && unit < 4; unit += 1) size /= 1000;
  return `${unit ? Number(size.toPrecision(3)) : size} ${["B", "KB", "MB", "GB", "TB"][unit]}`;
}

// Ages grow although nothing else changes: `updateAges` rewrites them.
const age = (at) => element("span", { "data-at": at, class: "age" });

function updateAges(main, now) {
  for (const each of main.querySelectorAll("[data-at]")) {
    const text = ago(Math.max(now - Number(each.dataset.at), 0));
    if (each.textContent !== text) each.textContent = text;
  }
}

function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => element("th", { scope: "col", class: kind }, name));
  const cell = (content, at) => element("td", { class: columns[at][1] }, ...(Array.isArray(content) ? content : [content instanceof Node ? content : String(content)]));
  const body = rows.map((row) => element("tr", {}, ...row.map(cell)));
  const made = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
  if (caption) made.prepend(element("caption", {}, caption));
  const named = { tabindex: "0", role: "region", "aria-label": caption, "data-key": `table ${caption}` };
  return element("div", { class: "scroll", ...named }, made);
}

function section(name, ...children) {
  const id = `s${(serial += 1)}`;
  return element("section", { "aria-labelledby": id }, element("h2", { id }, name), ...children);
}
