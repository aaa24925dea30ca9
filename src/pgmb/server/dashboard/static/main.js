// Makes a page that is complete without it fresh and quick: live regions, charts, keys, copying, the theme.

import { Charts } from "./charts.js";
import { keys } from "./keyboard.js";
import { Regions } from "./regions.js";
import { tickTimes } from "./times.js";

const body = document.body;

for (const hidden of document.querySelectorAll("[data-copy], [data-theme-toggle], [data-help], [data-choose-all]")) {
  hidden.hidden = false;
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `pgmb_theme=${root.dataset.theme}; path=${body.dataset.root || "/"}; max-age=31536000; samesite=strict`;
}

async function copy(button) {
  const text = document.querySelector(button.dataset.copy).textContent;
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = said; }, 1500);
}

function chosen() {
  const count = document.querySelectorAll("td.choose input:checked").length;
  for (const told of document.querySelectorAll("[data-chosen]")) {
    told.textContent = count ? `${count} chosen` : "";
  }
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-copy], [data-theme-toggle], [data-help]");
  if (!target) {
    for (const open of document.querySelectorAll("details.confirm[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
    return;
  }
  if (target.dataset.copy) copy(target);
  else if ("help" in target.dataset) document.getElementById("help").showModal();
  else theme();
});

document.addEventListener("change", (event) => {
  if ("chooseAll" in event.target.dataset) {
    for (const box of document.querySelectorAll("td.choose input")) box.checked = event.target.checked;
  }
  chosen();
});

// One that opens closes the others.
document.addEventListener("toggle", (event) => {
  if (event.target.open && event.target.matches("details.confirm")) {
    for (const other of document.querySelectorAll("details.confirm[open]")) {
      if (other !== event.target) other.open = false;
    }
  }
}, true);

function badges(counts) {
  for (const badge of document.querySelectorAll("[data-badge]")) {
    const count = counts[badge.dataset.badge];
    const shown = document.createElement("b");
    shown.textContent = count;
    badge.replaceChildren(...(count === "0" ? [] : [shown]));
  }
}

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
keys({ theme });
tickTimes();

if (body.dataset.live && !("still" in body.dataset)) {
  const charts = new Charts(document.querySelectorAll("[data-chart]"));
  const regions = new Regions(() => {
    for (const hidden of document.querySelectorAll("[data-copy], [data-choose-all]")) hidden.hidden = false;
    chosen();
    tickTimes();
  });
  const sign = document.getElementById("live");
  const source = new EventSource(body.dataset.live);
  const say = (state) => {
    sign.hidden = false;
    sign.dataset.state = state;
    sign.lastElementChild.textContent = state;
  };
  source.addEventListener("history", (event) => {
    const told = JSON.parse(event.data);
    charts.begin(told.at, told.curves);
    regions.told(told.marks);
    badges(told.badges);
    say("live");
  });
  source.addEventListener("sample", (event) => {
    const told = JSON.parse(event.data);
    charts.add(told.at, told.curves);
    regions.told(told.marks);
    badges(told.badges);
  });
  source.addEventListener("error", () => say(source.readyState === EventSource.CLOSED ? "offline" : "reconnecting"));
  addEventListener("pagehide", () => source.close());
}
