// Renews what the page shows, from server-sent events. What arrives is set as text, never as markup.

const lost = document.getElementById("lost");
const rows = document.getElementById("rows");
const count = document.getElementById("count");
const range = document.getElementById("range");
const chart = startChart(document.getElementById("chart"));
let source = null;

// Browsers have few connections to one host: a page that nobody sees leaves its own to others.
function connect() {
  if (document.hidden) {
    source?.close();
    source = null;
  } else if (!source) {
    source = new EventSource(document.body.dataset.events);
    source.onopen = () => { lost.hidden = true; };
    source.onerror = () => { lost.hidden = false; };
    source.onmessage = show;
  }
}

document.addEventListener("visibilitychange", connect);
connect();

function show(event) {
  lost.hidden = true;
  const sample = JSON.parse(event.data);
  for (const each of document.querySelectorAll("[data-number]")) {
    setText(each, sample.numbers[each.dataset.number] ?? "");
  }
  if (rows && sample.rows) {
    showRows(sample.rows);
    setText(count, `${sample.total.toLocaleString("en")} in all`);
    setText(range, `${sample.total ? sample.first + 1 : 0} to ${sample.first + sample.rows.length}`);
  }
  if (chart) chart(sample.time, sample.rates);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function showRows(wanted) {
  while (rows.rows.length > wanted.length) rows.deleteRow(-1);
  wanted.forEach((cells, number) => {
    const row = rows.rows[number] ?? rows.insertRow();
    cells.forEach(([text, link], column) => {
      let cell = row.cells[column];
      if (!cell) {
        cell = row.insertCell();
        if (rows.dataset.numbers[column] === "1") cell.className = "number";
      }
      if (!link) {
        setText(cell, text);
        return;
      }
      let anchor = cell.firstElementChild;
      if (!anchor) {
        anchor = document.createElement("a");
        cell.replaceChildren(anchor);
      }
      if (anchor.getAttribute("href") !== link) anchor.setAttribute("href", link);
      setText(anchor, text);
    });
  });
}

function startChart(place) {
  if (!place) return null;
  const style = getComputedStyle(document.documentElement);
  const names = ["Published", "Delivered", "Acked", "Rejected", "Dead"];
  const keys = ["published", "delivered", "acked", "rejected", "dead"];
  const points = JSON.parse(place.dataset.history);
  const data = [0, 1, 2, 3, 4, 5].map((column) => points.map((point) => point[column]));
  const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
  const size = () => ({ width: Math.max(280, place.clientWidth), height: 220 });
  const plot = new uPlot({
    ...size(),
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => `${Math.round(tick - (data[0].at(-1) ?? 0))} s`) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en")) },
    ],
    series: [
      { label: "Uptime", value: (_, seconds) => (seconds == null ? "" : `${Math.round(seconds)} s`) },
      ...names.map((label, number) => ({
        label,
        stroke: style.getPropertyValue(`--${keys[number]}`),
        width: 2,
        value: (_, rate) => (rate == null ? "" : `${Math.round(rate).toLocaleString("en")}/s`),
      })),
    ],
  }, data, place);
  addEventListener("resize", () => plot.setSize(size()));
  return (time, rates) => {
    if (rates.includes(null)) return;
    [time, ...rates].forEach((value, column) => data[column].push(value));
    if (data[0].length > 900) data.forEach((column) => column.shift());
    plot.setData(data);
  };
}
