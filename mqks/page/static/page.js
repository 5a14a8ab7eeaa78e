// Renews what the page shows, from server-sent events. What arrives is set as text, never as markup.

const lost = document.getElementById("lost");
const rows = document.getElementById("rows");
const count = document.getElementById("count");
const well = document.getElementById("well");
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
    source.addEventListener("queue", (event) => {
      const { numbers, point: [time, ...values] } = JSON.parse(event.data);
      showNumbers(numbers);
      if (time) chart?.(time, values);
    });
  }
}

document.addEventListener("visibilitychange", connect);
connect();

function show(event) {
  lost.hidden = true;
  const sample = JSON.parse(event.data);
  showNumbers(sample.numbers);
  if (rows && sample.rows) {
    showRows(sample.rows);
    if (well) {
      well.hidden = sample.rows.length > 0;
      rows.closest(".scrolled").hidden = !well.hidden;
    }
    if (count) setText(count, `${sample.total.toLocaleString("en")} in all`);
    if (range) setText(range, `${sample.total ? sample.first + 1 : 0} to ${sample.first + sample.rows.length}`);
  }
  if (well) chart?.(sample.time, sample.rates);
}

function showNumbers(numbers) {
  for (const each of document.querySelectorAll("[data-number]")) {
    setText(each, numbers[each.dataset.number] ?? each.textContent);
  }
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
      if (!link) {  // Also where a link was.
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
  const lines = JSON.parse(place.dataset.series);
  const isDay = place.dataset.day === "1";
  const points = JSON.parse(place.dataset.history);
  const data = [0, ...lines.keys()].map((_, column) => points.map((point) => point[column]));
  const upwards = { range: (_, low, high) => [0, Math.max(1, high * 1.1)] };
  const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
  const size = () => ({ width: Math.max(280, place.clientWidth), height: 220 });
  const clock = (seconds, end) => new Date(seconds * 1000).toISOString().slice(11, end);
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
  const ticks = { size: 70, values: (_, ticks) => ticks.map(number) };
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
        { ...ticks, scale, side: 1, grid: { show: false }, stroke: style.getPropertyValue(`--${colour}`) }
      )),
    ],
    series: [
      { label: "UTC", value: (plot, time) => ((time ??= plot.data[0].at(-1)) == null ? "" : clock(time, 19)) },
      ...lines.map(([label, colour, scale = "y"], line) => ({
        label,
        scale,
        stroke: style.getPropertyValue(`--${colour}`),
        width: 2,
        value: (plot, value) => ((value ??= plot.data[line + 1].at(-1)) == null ? "" : number(value)),
      })),
    ],
  }, data, place);
  // Where no pointer is: the values of the moment.
  plot.setLegend({ idx: null });
  addEventListener("resize", () => plot.setSize(size()));
  return (time, values) => {
    if (time < data[0].at(-1) - 60) data.forEach((column) => { column.length = 0; });  // The clock was set back.
    if (isDay || values.includes(null) || time <= data[0].at(-1)) return;
    [time, ...values].forEach((value, column) => data[column].push(value));
    while (data[0][0] < time - 600) data.forEach((column) => column.shift());
    plot.setData(data);
    if (plot.cursor.idx == null) plot.setLegend({ idx: null });
  };
}
