// `/` searches, `g` and a letter goes to a page, `j` and `k` move in the table, Enter opens, `?` helps.

export function keys({ theme }) {
  let going = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input:not([type=checkbox]):not([type=radio]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const after = Date.now() - going < 1500;
    going = 0;
    if (after) {
      const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        link.click();
      }
      return;
    }
    switch (event.key) {
      case "g":
        going = Date.now();
        break;
      case "/": {
        const search = document.querySelector("[data-search]");
        if (search) {
          event.preventDefault();
          search.focus();
          search.select();
        } else {
          location.href = `${document.body.dataset.root}/ui/events`;
        }
        break;
      }
      case "j":
      case "k":
        move(event.key === "j" ? 1 : -1);
        event.preventDefault();
        break;
      case "x":
        document.querySelector("tr.current td.choose input")?.click();
        break;
      case "Enter":
        if (event.target === document.body || event.target.matches("main, .scroll")) {
          document.querySelector("tr.current td a")?.click();
        }
        break;
      case "t":
        theme();
        break;
      case "?":
        document.getElementById("help")?.showModal();
        break;
      case "Escape":
        for (const open of document.querySelectorAll("details.confirm[open]")) open.open = false;
        break;
      default:
    }
  });
}

function move(by) {
  const rows = [...document.querySelectorAll("table.rows tbody tr")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.classList.contains("current"));
  const next = now < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, now + by));
  rows[now]?.classList.remove("current");
  rows[next].classList.add("current");
  rows[next].scrollIntoView({ block: "nearest" });
  rows[next].querySelector("td a")?.focus({ preventScroll: true });
}
