// A bar divided into parts, and the table that names them.

import { element, shape } from "./chart.js";
import { count, percent } from "./format.js";

// parts: [{ label, value, fill, title? }] with fill one of first, second, third, none.
export function drawShares(root, { headline, caption, parts, note }) {
  const total = parts.reduce((sum, { value }) => sum + value, 0);
  const bar = shape("svg", { class: "share-bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", role: "img" });
  let x = 0;
  for (const { value, fill } of parts) {
    const width = total > 0 ? (100 * value) / total : 0;
    bar.append(shape("rect", { class: `fill-${fill}`, x, y: 0, width, height: 1 }));
    x += width;
  }
  bar.setAttribute("aria-label", parts.map(({ label, value }) => `${label} ${percent(value, total)}`).join(", "));
  const table = element("table", "shares");
  const body = element("tbody");
  for (const { label, value, fill, title } of parts) {
    const row = element("tr");
    const head = element("th");
    head.scope = "row";
    head.append(element("span", `swatch fill-${fill}`), label);
    if (title) head.title = title;
    row.append(head, element("td", "", count(value)), element("td", "", percent(value, total)));
    body.append(row);
  }
  table.append(body);
  const heading = element("p", "headline");
  heading.append(element("b", "", headline), ` ${caption}`);
  root.replaceChildren(heading, bar, table, ...(note ? [element("p", "muted hint", note)] : []));
}
