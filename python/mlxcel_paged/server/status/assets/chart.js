// A small plot of the last two minutes: one or two lines, their newest values above, the value under the pointer on demand.

import { SHOWN_S } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 100;

export class Chart {
  #series;
  #points = [];
  #format;
  #plot;
  #ceiling;
  #age;
  #cursor;
  #pointerX = null;

  // series: [{ label, isPlotted }]; format turns a value into text; floor is the least that the axis spans.
  constructor(root, { series, format, floor }) {
    this.#format = format;
    this.floor = floor;
    const readings = element("div", "readings");
    this.#series = series.map(({ label, isPlotted = true }, index) => {
      const reading = element("span", isPlotted ? `reading series-${index}` : "reading");
      const value = element("b");
      reading.append(value, label);
      readings.append(reading);
      return { label, value, isPlotted };
    });
    const box = element("div", "plot");
    this.#plot = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.#cursor = shape("line", { class: "cursor", y1: 0, y2: HEIGHT });
    this.#ceiling = element("span", "ceiling");
    box.append(this.#plot, this.#ceiling);
    const times = element("div", "times");
    this.#age = element("span");
    times.append(`${SHOWN_S / 60} min ago`, this.#age);
    root.append(readings, box, times);
    box.addEventListener("pointermove", (event) => {
      const { left, width } = box.getBoundingClientRect();
      this.#pointerX = (event.clientX - left) / width;
      this.#draw();
    });
    box.addEventListener("pointerleave", () => {
      this.#pointerX = null;
      this.#draw();
    });
    this.#draw();
  }

  // values: one number or null for each series.
  add(now, values) {
    this.#points.push({ now, values });
    while (this.#points[0].now < now - SHOWN_S) this.#points.shift();
    this.#draw();
  }

  clear() {
    this.#points = [];
    this.#draw();
  }

  #draw() {
    const newest = this.#points.at(-1);
    const isKnown = (value, index) => value !== null && this.#series[index].isPlotted;
    const known = this.#points.flatMap(({ values }) => values.filter(isKnown));
    const top = niceCeiling(Math.max(this.floor, ...known));
    const x = (now) => WIDTH * (1 + (now - newest.now) / SHOWN_S);
    const y = (value) => HEIGHT * (1 - value / top);
    const shapes = [0, 0.5, 1].map((part) => shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
    this.#series.forEach(({ isPlotted }, index) => {
      if (!isPlotted) return;
      for (const run of runs(this.#points, index)) {
        const corners = run.map(({ now, values }) => `${x(now).toFixed(2)},${y(values[index]).toFixed(2)}`);
        if (corners.length === 1) corners.push(corners[0]);
        const ends = [`${x(run.at(-1).now)},${HEIGHT}`, `${x(run[0].now)},${HEIGHT}`];
        const colour = `series-${index}`;
        if (index === 0) shapes.push(shape("polygon", { class: colour, points: [...corners, ...ends].join(" ") }));
        shapes.push(shape("polyline", { class: colour, points: corners.join(" ") }));
      }
    });
    const read = this.#underPointer(newest) ?? newest;
    if (read && read !== newest) {
      this.#cursor.setAttribute("x1", x(read.now));
      this.#cursor.setAttribute("x2", x(read.now));
      shapes.push(this.#cursor);
    }
    this.#plot.replaceChildren(...shapes);
    this.#ceiling.textContent = this.#format(top);
    const age = read === newest ? "now" : `${Math.round(newest.now - read.now)} s ago`;
    this.#age.textContent = age;
    const texts = this.#series.map(({ label, value }, index) => {
      value.textContent = this.#format(read ? read.values[index] : null);
      return `${label} ${value.textContent}`;
    });
    this.#plot.setAttribute("aria-label", `Last ${SHOWN_S / 60} minutes; ${age}: ${texts.join(", ")}`);
  }

  #underPointer(newest) {
    if (this.#pointerX === null || !newest) return null;
    const wanted = newest.now - SHOWN_S * (1 - this.#pointerX);
    return this.#points.reduce((best, point) =>
      Math.abs(point.now - wanted) < Math.abs(best.now - wanted) ? point : best);
  }
}

// Consecutive points whose value is known: a line has gaps where nothing was measured.
function runs(points, index) {
  const found = [];
  let open = null;
  for (const point of points) {
    if (point.values[index] === null) {
      open = null;
    } else if (open) {
      open.push(point);
    } else {
      found.push((open = [point]));
    }
  }
  return found;
}

// The next of 1, 2, 2.5 and 5 times a power of ten.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
