"use strict";
// Sort, filter, search, zoom, values under the pointer, and records: all from what the page holds.

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

let kept;
async function records() {
  kept ??= JSON.parse(await unpacked(document.getElementById("records").textContent));
  return kept;
}
const tip = document.getElementById("tip");
const dialog = document.getElementById("record");
const filters = new Map();

// A number to sort by; text where a column is to the left and not of numbers.
function keysOf(rows, column, left) {
  const texts = rows.map((row) => row.cells[column].textContent.replaceAll(",", ""));
  const numbers = texts.map((text) => (/^[-+]?(\d|\.\d)/.test(text) ? parseFloat(text) : NaN));
  const numeric = !left || texts.every((text, row) => text === "" || text === "–" || !Number.isNaN(numbers[row]));
  return numeric ? numbers : texts;
}

for (const figure of document.querySelectorAll("figure.table")) {
  const body = figure.querySelector("tbody");
  const original = [...body.rows];
  const heads = [...figure.querySelectorAll("thead tr:last-child th")];
  const search = figure.querySelector("input[type=search]");
  const selects = [...figure.querySelectorAll("select")];
  const count = figure.querySelector(".count");

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of original) {
      const text = row.textContent.toLowerCase();
      const cells = [...row.cells].map((cell) => cell.textContent);
      const fits = words.every((word) => text.includes(word))
        && selects.every((one) => !one.value || cells[one.dataset.column] === one.value);
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown.toLocaleString("en")} of ${original.length.toLocaleString("en")} rows`;
  };
  search.addEventListener("input", filter);
  for (const one of selects) one.addEventListener("change", filter);
  count.textContent = `${original.length.toLocaleString("en")} of ${original.length.toLocaleString("en")} rows`;
  let texts;
  filters.set(figure, {
    matches: (words) => {
      texts ??= original.map((row) => row.textContent.toLowerCase());
      return texts.filter((text) => words.every((word) => text.includes(word))).length;
    },
    set: (value) => { search.value = value; filter(); },
  });

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" };
      const order = next[head.getAttribute("aria-sort")] || "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      if (order === "none") {
        body.append(...original);
        return;
      }
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const found = keysOf(original, column, head.classList.contains("l"));
      const keys = new Map(original.map((row, index) => [row, found[index]]));
      const compare = (first, second) => {
        const [a, b] = [keys.get(first), keys.get(second)];
        if (typeof a === "string") return sign * a.localeCompare(b, "en");
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return sign * (a - b);
      };
      body.append(...[...original].sort(compare));
    });
  });
}

function place(event) {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 6);
  const above = event.clientY - height - 12;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${above > 6 ? above : event.clientY + 16}px`;
}

async function draw(canvas) {
  const packed = canvas.dataset.packed;
  if (!packed) return;
  delete canvas.dataset.packed;
  try {
    canvas.innerHTML = await unpacked(packed);
    canvas.removeAttribute("style");
    canvas.classList.add("shown");
    prepare(canvas.closest("figure.plot"));
  } catch (error) {
    canvas.textContent = "This browser cannot unpack the figure; it is in the PDF.";
  }
}
const canvases = [...document.querySelectorAll(".canvas")];
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target);
}, { rootMargin: "1200px" });
canvases.forEach((canvas) => near.observe(canvas));
// All of them, for somebody who prints the page.
window.drawAll = () => Promise.all(canvases.map(draw));

function prepare(figure) {
  const svg = figure.querySelector("svg");
  const whole = svg.viewBox.baseVal;
  const home = { x: whole.x, y: whole.y, width: whole.width, height: whole.height };
  const pointers = new Map();
  let box = { ...home };

  const show = () => {
    const share = Math.min(1, Math.max(0.05, box.width / home.width));
    box.width = share * home.width;
    box.height = share * home.height;
    box.x = Math.min(Math.max(box.x, home.x), home.x + home.width - box.width);
    box.y = Math.min(Math.max(box.y, home.y), home.y + home.height - box.height);
    svg.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
    svg.classList.toggle("zoomed", share < 1);
  };
  const zoom = (by, clientX, clientY) => {
    const edge = svg.getBoundingClientRect();
    const across = clientX === undefined ? 0.5 : (clientX - edge.left) / edge.width;
    const down = clientY === undefined ? 0.5 : (clientY - edge.top) / edge.height;
    const width = Math.min(home.width, Math.max(0.05 * home.width, box.width / by));
    const height = width * home.height / home.width;
    box = {
      x: box.x + across * (box.width - width), y: box.y + down * (box.height - height), width, height,
    };
    show();
  };
  figure.querySelector(".controls").addEventListener("click", (event) => {
    const { zoom: wish } = event.target.dataset;
    if (wish === "reset") { box = { ...home }; show(); }
    else if (wish) zoom(wish === "in" ? 1.6 : 1 / 1.6);
  });
  svg.addEventListener("wheel", (event) => {
    // A bare wheel scrolls the page until the reader has zoomed in.
    if (!event.ctrlKey && box.width === home.width) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX, event.clientY);
  }, { passive: false });
  svg.addEventListener("dblclick", (event) => zoom(2, event.clientX, event.clientY));
  svg.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    if (box.width < home.width) svg.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    svg.addEventListener(end, (event) => pointers.delete(event.pointerId));
  }
  svg.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before && pointers.size === 1 && box.width < home.width) {
      const scale = box.width / svg.getBoundingClientRect().width;
      box.x -= (event.clientX - before.clientX) * scale;
      box.y -= (event.clientY - before.clientY) * scale;
      show();
    } else if (before && pointers.size === 2) {
      const [other] = [...pointers.values()].filter((one) => one.pointerId !== event.pointerId);
      const far = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
      zoom(far(event) / Math.max(1, far(before)), other.clientX, other.clientY);
    }
    if (before) pointers.set(event.pointerId, event);
  });
  const over = (event) => {
    const words = event.target.dataset && event.target.dataset.tip;
    if (!words) { tip.hidden = true; return; }
    tip.textContent = words;
    place(event);
  };
  svg.addEventListener("pointermove", over);
  svg.addEventListener("click", over);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function pairs(values, parent) {
  const list = element("dl", undefined, parent);
  for (const [key, value] of Object.entries(values)) {
    if (value === "" || value === null) continue;
    element("dt", key, list);
    element("dd", value, list);
  }
}

function sparkline(samples, parent) {
  const [low, high] = [Math.min(...samples), Math.max(...samples)];
  const at = (value, index) => {
    const x = samples.length > 1 ? 4 + 392 * index / (samples.length - 1) : 200;
    const y = high > low ? 66 - 60 * (value - low) / (high - low) : 36;
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  };
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 400 72");
  svg.setAttribute("preserveAspectRatio", "none");
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", samples.map(at).join(" "));
  line.setAttribute("style", "fill:none;stroke:var(--accent);stroke-width:1.5;vector-effect:non-scaling-stroke");
  svg.append(line);
  parent.append(svg);
}

async function open(place) {
  const { records: found, environments } = await records();
  const record = found[place];
  if (!record) return;
  const box = dialog.querySelector("div");
  box.replaceChildren();
  element("h3", record.id, box);
  const top = element("p", `${record.status} · `, box);
  const link = element("a", "record (JSON)", top);
  link.href = record.file;
  const phases = Object.entries(record.phases);
  if (phases.length) {
    const holder = element("div", undefined, box);
    holder.className = "scroll";
    const table = element("table", undefined, holder);
    const head = element("tr", undefined, element("thead", undefined, table));
    for (const word of ["phase", "clock", "samples", "median (ms)", "Q1", "Q3", "least"]) {
      element("th", word, head);
    }
    const body = element("tbody", undefined, table);
    for (const [name, values] of phases) {
      const row = element("tr", undefined, body);
      for (const value of [name, ...values]) element("td", value, row);
    }
    element("p", `Samples of ${phases[phases.length - 1][0]}, in order:`, box).className = "note";
    sparkline(record.samples, box);
  }
  pairs(record.facts, box);
  element("h3", "Case", box);
  pairs(record.case, box);
  element("h3", "Environment", box);
  pairs(environments[record.environment], box);
  if (!dialog.open) dialog.showModal();
}

function follow() {
  const found = /^#r(\d+)$/.exec(location.hash);
  if (found) open(Number(found[1]));
  else if (dialog.open) dialog.close();
}
document.addEventListener("click", (event) => {
  const link = event.target.closest && event.target.closest('a[href^="#r"]');
  const found = link && /^#r(\d+)$/.exec(link.getAttribute("href"));
  if (!found) return;
  // The place on the page is kept; the address can be sent to somebody else.
  event.preventDefault();
  history.replaceState(null, "", link.getAttribute("href"));
  open(Number(found[1]));
});
window.addEventListener("hashchange", follow);
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
follow();

// Contents: beside the page, or over it on a phone; the part on the screen is marked.
const menu = document.getElementById("menu");
const side = document.getElementById("side");
const toggle = (isOpen) => {
  document.body.classList.toggle("open", isOpen);
  menu.setAttribute("aria-expanded", String(isOpen));
};
menu.addEventListener("click", () => toggle(!document.body.classList.contains("open")));
side.addEventListener("click", (event) => { if (event.target.closest("a")) toggle(false); });
document.querySelector("main").addEventListener("click", () => toggle(false));
const links = new Map([...side.querySelectorAll("#contents a")].map((link) => [link.hash.slice(1), link]));
const inView = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    for (const link of links.values()) link.classList.remove("here");
    links.get(target.id).classList.add("here");
  }
}, { rootMargin: "-10% 0px -80% 0px" });
for (const id of links.keys()) {
  const part = document.getElementById(id);
  if (part && !["paper", "appendix"].includes(id)) inView.observe(part);
}

// Search: the tables whose rows or caption have all the words, and how many rows do.
const hits = document.getElementById("hits");
const field = document.getElementById("search");
const MOST_HITS = 40;
function look() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  hits.hidden = !words.length;
  hits.replaceChildren();
  if (!words.length) return;
  let count = 0;
  for (const [figure, { matches, set }] of filters) {
    const caption = figure.querySelector("figcaption").textContent;
    const rows = matches(words);
    const named = words.every((word) => caption.toLowerCase().includes(word));
    if (!rows && !named) continue;
    count += 1;
    if (count > MOST_HITS) continue;
    const item = element("li", undefined, hits);
    element("span", rows ? `${rows.toLocaleString("en")} rows` : "caption", item).className = "count";
    const link = element("a", caption.slice(0, 70), item);
    link.href = `#${figure.id}`;
    link.addEventListener("click", () => {
      set(rows ? field.value : "");
      for (const other of document.querySelectorAll(".flash")) other.classList.remove("flash");
      figure.classList.add("flash");
    });
  }
  if (!count) element("li", "no table has all of these words", hits);
  if (count > MOST_HITS) element("li", `and ${count - MOST_HITS} more tables`, hits);
}
let waiting;
field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(look, 120); });
field.addEventListener("focus", () => { if (field.value) toggle(true); });
field.addEventListener("input", () => toggle(Boolean(field.value)));

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Paper is white, whatever the screen.
let screenTheme;
window.addEventListener("beforeprint", () => {
  window.drawAll();
  screenTheme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  if (dialog.open) dialog.close();
  for (const details of document.querySelectorAll("details")) details.open = true;
});
window.addEventListener("afterprint", () => {
  if (screenTheme) document.documentElement.dataset.theme = screenTheme;
  else delete document.documentElement.dataset.theme;
});
