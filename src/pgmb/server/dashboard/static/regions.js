// Swaps the marked regions of a page for those of the same page fetched again, when what they watch has changed.
// What the reader was doing stays: focus, chosen rows, open details, places scrolled to.

const LEAST_PAUSE = 1500;

export class Regions {
  constructor(swapped) {
    this.swapped = swapped;
    this.marks = null;
    this.waiting = false;
    this.busy = false;
    this.last = 0;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.waiting) this.refresh();
    });
  }

  told(marks) {
    const before = this.marks;
    this.marks = marks;
    const watched = new Set();
    for (const region of document.querySelectorAll("[data-region][data-watch]")) watched.add(region.dataset.watch);
    // The page was made before the first marks came: anything may have changed since.
    if ([...watched].some((subject) => before?.[subject] !== marks[subject])) this.refresh();
  }

  refresh() {
    if (document.hidden || this.busy) {
      this.waiting = true;
      return;
    }
    const pause = this.last + LEAST_PAUSE - Date.now();
    if (pause > 0) {
      this.busy = true;
      setTimeout(() => { this.busy = false; this.refresh(); }, pause);
      return;
    }
    this.fetch();
  }

  async fetch() {
    this.busy = true;
    this.waiting = false;
    this.last = Date.now();
    try {
      const answer = await fetch(location.href, { headers: { "X-Pgmb-Fragment": "1" }, credentials: "same-origin" });
      if (answer.status === 401) {
        location.reload();
        return;
      }
      if (answer.ok) this.swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch {
      this.waiting = true;
    } finally {
      this.busy = false;
    }
    if (this.waiting) this.refresh();
  }

  swap(fresh) {
    for (const region of document.querySelectorAll("[data-region]")) {
      const other = fresh.getElementById(region.id);
      if (!other || other.innerHTML === region.innerHTML || inUse(region)) continue;
      const kept = keep(region);
      region.replaceChildren(...other.childNodes);
      region.className = other.className;
      restore(region, kept);
    }
    this.swapped();
  }
}

function inUse(region) {
  const focused = document.activeElement;
  const writing = focused && region.contains(focused) && focused.matches("input:not([type=checkbox]), select, textarea");
  // Rows that move away from under the eye cannot be read.
  const read = "hold" in region.dataset && (region.matches(":hover") || region.querySelector("tr.current"));
  return writing || read || region.querySelector("details.confirm[open]") !== null;
}

function keep(region) {
  const focused = region.contains(document.activeElement) ? document.activeElement : null;
  const row = focused && focused.closest("tr[data-key]");
  return {
    chosen: [...region.querySelectorAll("input:checked[value]")].map((box) => box.value),
    open: [...region.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key),
    current: region.querySelector("tr.current")?.dataset.key,
    scrolled: [...region.querySelectorAll(".scroll")].map((box) => box.scrollLeft),
    focus: row && { key: row.dataset.key, place: [...row.querySelectorAll("a, input, button")].indexOf(focused) },
  };
}

function restore(region, kept) {
  for (const box of region.querySelectorAll("input[type=checkbox][value]")) box.checked = kept.chosen.includes(box.value);
  for (const one of region.querySelectorAll("details[data-key]")) if (kept.open.includes(one.dataset.key)) one.open = true;
  region.querySelectorAll(".scroll").forEach((box, place) => { box.scrollLeft = kept.scrolled[place] || 0; });
  for (const row of region.querySelectorAll("tr[data-key]")) {
    if (row.dataset.key === kept.current) row.classList.add("current");
    if (kept.focus && row.dataset.key === kept.focus.key) {
      row.querySelectorAll("a, input, button")[kept.focus.place]?.focus({ preventScroll: true });
    }
  }
}
