// Renews what the page shows, from server-sent events, and answers the keyboard. What arrives is set as text, never as
// markup; only pages of the server itself are taken whole, when a list is filtered. Everything is there without this.

const byId = (id) => document.getElementById(id);
const lost = byId("lost");
let source = null;
let chart = null;

document.documentElement.classList.add("js");

// Browsers have few connections to one host: a page that nobody sees leaves its own to others.
function connect() {
  const { events, tail } = document.body.dataset;
  if (document.hidden || !(events || tail)) {
    source?.close();
    source = null;
  } else if (!source) {
    source = new EventSource(events ?? tail);
    source.onopen = () => { lost.hidden = true; };
    source.onerror = () => { lost.hidden = false; };
    source.onmessage = ({ data }) => {
      lost.hidden = true;
      (tail ? showTail : show)(JSON.parse(data));
    };
    source.addEventListener("queue", ({ data }) => showQueue(JSON.parse(data)));
    source.addEventListener("batch", ({ data }) => showBatch(JSON.parse(data)));
    source.addEventListener("gone", () => { if (byId("gone")) byId("gone").hidden = false; });
    source.addEventListener("failed", ({ data }) => {
      source.close();
      setText(byId("tail-told"), JSON.parse(data));
    });
  }
}

function reconnect() {
  source?.close();
  source = null;
  connect();
}

function show({ numbers, trends, rows, total, first, time, rates }) {
  showNumbers(numbers, trends);
  const body = byId("rows");
  const well = byId("well");
  if (body && rows) {
    showRows(body, rows);
    body.closest(".scrolled").hidden = rows.length === 0;
    for (const each of [well, byId("empty")]) if (each) each.hidden = rows.length > 0;
    if (byId("count")) setText(byId("count"), `${total.toLocaleString("en")} in all`);
    if (byId("range")) setText(byId("range"), `${total ? first + 1 : 0} to ${first + rows.length}`);
  }
  if (well) chart?.(time, rates);
}

function showQueue({ numbers, trends, mark, point: [time, ...values], progress = {} }) {
  showNumbers(numbers, trends);
  showBadges(byId("marks"), mark);
  if (time) chart?.(time, values);
  for (const each of document.querySelectorAll("[data-progress]")) {
    const [value, text] = progress[each.dataset.progress] ?? [];
    const told = `${value} % ${text}`.trim();
    if (value === undefined || each.textContent.trim() === told) continue;
    each.replaceChildren(Object.assign(document.createElement("progress"), { max: 100, value, ariaLabel: "Progress" }), ` ${told}`);
  }
}

function showBatch({ numbers, trends, bar, closed }) {
  showNumbers(numbers, trends);
  showBadges(byId("marks"), closed ? "closed" : "open");
  for (const each of document.querySelectorAll("[data-bar]")) {
    ["x", "width"].forEach((name, at) => setAttribute(each, name, String(bar[each.dataset.bar][at])));
  }
}

function showNumbers(numbers, trends) {
  for (const each of document.querySelectorAll("[data-number]")) {
    setText(each, numbers[each.dataset.number] ?? each.textContent);
  }
  for (const each of document.querySelectorAll("[data-trend]")) {
    setAttribute(each, "points", trends[each.dataset.trend] ?? each.getAttribute("points"));
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function child(parent, name) {
  let found = parent.firstElementChild;
  if (found?.localName !== name) {
    const space = ["svg", "polygon"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    found = document.createElementNS(space, name);
    parent.replaceChildren(found);
  }
  return found;
}

function showBadges(place, marks) {
  if (place.textContent.trim() === marks.replaceAll(", ", "")) return;
  place.replaceChildren(...marks.split(", ").filter(Boolean).map((mark) => {
    const badge = document.createElement("span");
    badge.className = `badge ${mark.replaceAll(" ", "-")}`;
    badge.textContent = mark;
    return badge;
  }));
}

// As the macro `content` of cell.html.
function showCell(cell, kind, text, link) {
  if (kind === "marks") {
    showBadges(cell, text);
  } else if (kind === "time" && text) {
    const time = child(cell, "time");
    setText(time, text);
    setAttribute(time, "datetime", `${text.replace(" ", "T")}Z`);
    showHere(time);
  } else if (kind === "trend") {
    const svg = child(cell, "svg");
    for (const [name, value] of [["class", "trend"], ["viewBox", "0 0 100 24"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) setAttribute(svg, name, value);
    setAttribute(child(svg, "polygon"), "points", text);
  } else if (kind === "share" && text) {
    if (cell.textContent.trim() === text) return;
    const meter = Object.assign(document.createElement("meter"), { max: 100, high: 80, value: parseFloat(text) });
    cell.replaceChildren(meter, ` ${text}`);
  } else if (link) {
    const anchor = child(cell, "a");
    setAttribute(anchor, "href", link);
    setText(anchor, text);
  } else if (cell.firstElementChild || cell.textContent.trim() !== text) {
    cell.textContent = text;
  }
}

function showRows(body, wanted) {
  const kinds = body.dataset.kinds.trim().split(" ");
  while (body.rows.length > wanted.length) body.deleteRow(-1);
  wanted.forEach((cells, number) => {
    const row = body.rows[number] ?? body.insertRow();
    cells.forEach(([text, link], column) => {
      let cell = row.cells[column];
      if (!cell) {
        cell = row.insertCell();
        cell.className = kinds[column].replace(".", " ");
      }
      showCell(cell, kinds[column].split(".")[0], text, link);
    });
  });
}

// Times are those of UTC; beside them those of the reader's zone, which may be on another day.
function showHere(time) {
  const then = new Date(time.dateTime);
  if (Number.isNaN(then.getTime()) || then.getTimezoneOffset() === 0) return;
  const local = new Date(then - then.getTimezoneOffset() * 60000).toISOString();
  const [here, there] = [local, time.dateTime].map((each) => each.slice(0, 10));
  time.dataset.here = local.slice(11, 19) + (here > there ? " +1 d" : here < there ? " −1 d" : "");
  time.title = Intl.DateTimeFormat().resolvedOptions().timeZone;
}

// A list is filtered while one types: the server's own page with the filter, of which the list is taken.
function startFilter(input) {
  let timer = 0;
  let number = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const mine = ++number;
      const url = `${location.pathname}?${new URLSearchParams(new FormData(input.form))}`;
      const answer = await fetch(url);
      const there = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (mine !== number || !there.getElementById("list")) return;
      byId("list").replaceWith(document.adoptNode(there.getElementById("list")));
      document.body.dataset.events = there.body.dataset.events;
      history.replaceState(null, "", url);
      document.querySelectorAll("#list time").forEach(showHere);
      reconnect();
    }, 200);
  });
}

const TAIL_ROWS = 500;
let held = false;

function showTail({ time, rows, dropped }) {
  const body = byId("tail");
  if (!held) {
    for (const [event, id, data] of rows) {
      const row = body.insertRow(0);
      for (const [kind, text, link] of [["time", time], ["text", event], ["data", data], ["text", id, `/message?id=${encodeURIComponent(id)}`]]) {
        const cell = row.insertCell();
        cell.className = kind;
        showCell(cell, kind, text, link);
      }
    }
    while (body.rows.length > TAIL_ROWS) body.deleteRow(-1);
  }
  const told = body.rows.length ? `The last ${body.rows.length.toLocaleString("en")}` : "Nothing was published yet";
  setText(byId("tail-told"), `${told}${dropped ? `; ${dropped.toLocaleString("en")} came too fast to be shown` : ""}.`);
}

function startKeys() {
  let isAfterG = false;
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select");
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping) return;
    const view = isAfterG && document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    isAfterG = event.key === "g";
    if (view) location.assign(view.href);
    else if (event.key === "?") byId("keys").togglePopover();
    else if (event.key === "/") (document.querySelector("[type=search]") ?? document.querySelector("main input:not([type=hidden])"))?.focus();
    else return;
    event.preventDefault();
  });
  byId("show-keys").addEventListener("click", (event) => {
    event.preventDefault();
    byId("keys").showPopover();
  });
}

function startChart(place) {
  const style = getComputedStyle(document.documentElement);
  const token = (name) => style.getPropertyValue(`--${name}`).trim();
  const lines = JSON.parse(place.dataset.series);
  const isDay = place.dataset.day === "1";
  const points = JSON.parse(place.dataset.history);
  const data = [0, ...lines.keys()].map((_, column) => points.map((point) => point[column]));
  const upwards = { range: (_, low, high) => [0, Math.max(1, high * 1.1)] };
  const axis = { stroke: token("quiet"), grid: { stroke: token("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const size = () => ({ width: Math.max(240, place.clientWidth), height: 210 });
  const clock = (seconds, end) => new Date(seconds * 1000).toISOString().slice(11, end);
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
  const ticks = { size: 56, values: (_, ticks) => ticks.map(number) };
  const plot = new uPlot({
    ...size(),
    scales: {
      x: { time: false, range: (_, low, high) => [Math.min(low ?? 0, (high ?? 0) - 60), high ?? 0] },
      y: upwards,
      all: upwards,
    },
    axes: [
      {
        ...axis,
        space: 80,
        incrs: [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600],
        values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick, step < 60 ? 19 : 16)),
      },
      { ...axis, ...ticks },
      ...lines.filter(([, , scale]) => scale).map(([, colour, scale]) => (
        { ...axis, ...ticks, scale, side: 1, grid: { show: false }, stroke: token(colour) }
      )),
    ],
    series: [
      { label: "UTC", value: (plot, time) => ((time ??= plot.data[0].at(-1)) == null ? "" : clock(time, 19)) },
      ...lines.map(([label, colour, scale = "y"], line) => ({
        label,
        scale,
        stroke: token(colour),
        dash: label === "Out/s" ? [5, 3] : undefined,
        width: 1.5,
        points: { show: false },
        value: (plot, value) => ((value ??= plot.data[line + 1].at(-1)) == null ? "" : number(value)),
      })),
    ],
  }, data, place);
  // Where no pointer is: the values of the moment.
  plot.setLegend({ idx: null });
  addEventListener("resize", () => plot.setSize(size()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
  return (time, values) => {
    if (time < data[0].at(-1) - 60) data.forEach((column) => { column.length = 0; });  // The clock was set back.
    if (isDay || values.includes(null) || time <= data[0].at(-1)) return;
    [time, ...values].forEach((value, column) => data[column].push(value));
    while (data[0][0] < time - 600) data.forEach((column) => column.shift());
    plot.setData(data);
    if (plot.cursor.idx == null) plot.setLegend({ idx: null });
  };
}

document.querySelectorAll("time").forEach(showHere);
// Its library is half of all that is loaded: the rest is there and moves before.
if (byId("chart")) {
  const script = document.createElement("script");
  script.src = byId("chart").dataset.library;
  script.onload = () => { chart = startChart(byId("chart")); };
  document.head.append(script);
}
if (byId("list")) startFilter(document.querySelector("[type=search]"));
if (byId("hold")) {
  byId("hold").hidden = false;
  byId("hold").addEventListener("click", ({ target }) => {
    held = !held;
    target.setAttribute("aria-pressed", held);
    target.textContent = held ? "Continue" : "Pause";
  });
}
startKeys();
document.addEventListener("visibilitychange", connect);
connect();
