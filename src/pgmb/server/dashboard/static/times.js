// Durations and moments as the server writes them (formats.py).

export function age(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [size, unit, smaller, sub] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor((whole % size) / smaller);
      return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${sub}` : ""}`;
    }
  }
  return `${whole} s`;
}

function about(span) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (span >= size) return `${Math.floor(span / size)} ${unit}`;
  }
  return `${Math.round(span)} s`;
}

let ticking = null;

export function tickTimes() {
  clearInterval(ticking);
  const tick = () => {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const ago = (Date.now() - Date.parse(time.dateTime)) / 1000;
      const said = ago < 0 ? `in ${about(-ago)}` : ago >= 1 ? `${about(ago)} ago` : "now";
      if (time.textContent !== said) time.textContent = said;
    }
  };
  ticking = setInterval(tick, 5000);
}
