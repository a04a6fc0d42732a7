// Looks at /v1/status once a second while the page is visible, and shows what it says.

import { Chart, element } from "./chart.js";
import { bytes, count, duration, latency, percent, rate } from "./format.js";
import { History } from "./history.js";
import { PromptBox } from "./prompt.js";
import { drawShares } from "./shares.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 10000;
const byId = (id) => document.getElementById(id);

let apiKey = null; // kept in memory alone
let isLocked = false; // the server wants a key, or another one: nothing is asked for until somebody gives it
let history = new History();
let wake = () => {};

const headers = () => (apiKey === null ? {} : { authorization: `Bearer ${apiKey}` });
const askForKey = () => {
  isLocked = true;
  byId("key-label").textContent = apiKey === null ? "This server asks for an API key" : "This server does not know that API key";
  byId("key-form").hidden = false;
  showState("locked");
};
const promptBox = new PromptBox({ headers, onKeyWanted: askForKey });

const percentiles = [{ label: "median" }, { label: "p99" }];
const charts = {
  throughput: new Chart(byId("throughput"), {
    // Prompts go so much faster that on one axis nothing of the answers would be seen.
    series: [{ label: "generated" }, { label: "prefilled", isPlotted: false }],
    format: rate,
    floor: 10,
  }),
  batch: new Chart(byId("batch"), { series: [{ label: "running" }, { label: "waiting" }], format: count, floor: 4 }),
  ttft: new Chart(byId("ttft"), { series: percentiles, format: latency, floor: 0.1 }),
  itl: new Chart(byId("itl"), { series: percentiles, format: latency, floor: 0.02 }),
};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value;
  byId("key").value = "";
  byId("key-form").hidden = true;
  isLocked = false;
  wake();
});
document.addEventListener("visibilitychange", () => wake());

for (;;) {
  if (!document.hidden && !isLocked) await look();
  await new Promise((resolve) => {
    wake = resolve;
    if (!document.hidden && !isLocked) setTimeout(resolve, POLL_MS);
  });
}

async function look() {
  let response;
  let status;
  try {
    response = await fetch("v1/status", { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
    if (response.status === 401) {
      askForKey();
      return;
    }
    status = await response.json();
  } catch {
    showState("unreachable", "The server does not answer; the numbers are the last that it told.");
    return;
  }
  show(status);
}

function showState(state, message) {
  const shown = byId("state");
  if (shown.textContent !== state) shown.textContent = state;
  shown.dataset.state = state;
  byId("message").hidden = !message;
  byId("message").textContent = message ?? "";
  promptBox.setReady(state === "ready");
}

function show(status) {
  const now = performance.now() / 1e3;
  history.add(status, now);
  showState(status.state, status.message);
  showModel(status);
  const { metrics } = status;
  charts.throughput.add(now, [history.rate("generation_tokens_total"), history.rate("prefilled_tokens_total")]);
  charts.batch.add(now, [metrics.num_requests_running, metrics.num_requests_waiting]);
  for (const [chart, name] of [["ttft", "time_to_first_token_seconds"], ["itl", "inter_token_latency_seconds"]]) {
    charts[chart].add(now, [history.percentile(name, 0.5), history.percentile(name, 0.99)]);
  }
  showPages(status);
  showPaths(status);
  showTotals(status);
}

function showModel({ model, version, uptime_s, state }) {
  byId("version").textContent = version;
  const facts = [`up ${duration(uptime_s)}`];
  if (model) {
    byId("model").textContent = model.name;
    document.title = `${model.name} – mlxcel-paged`;
    facts.unshift(
      model.device === "cpu" ? "CPU" : "GPU",
      `${model.decode_storage} storage`,
      `up to ${count(model.max_batch)} at a time`,
      `${count(model.max_context)} tokens of context`,
    );
  } else if (byId("model").textContent.trim() === "") {
    byId("model").textContent = state === "loading" ? "The model is loading" : "No model";
  }
  byId("facts").textContent = facts.join(" · ");
}

function showPages({ metrics, model }) {
  const total = metrics.kv_pages_total;
  if (!total) {
    const isDense = model?.decode_storage === "dense";
    const text = isDense ? `Dense storage has no pages: ${model.decode_storage_reason}.` : "There are no pages yet.";
    byId("pages").replaceChildren(element("p", "muted headline", text));
    return;
  }
  const { kv_pages_used: used, kv_pages_cached: cached = 0 } = metrics;
  const free = Math.max(0, total - used - cached);
  const reserved = Math.min(free, metrics.kv_pages_reserved ?? 0);
  const queried = metrics.prefix_cache_queries_total ?? 0;
  drawShares(byId("pages"), {
    headline: percent(used, total),
    caption: `of ${count(total)} pages in use`,
    parts: [
      { label: "used", value: used, fill: "first", title: "held by sequences" },
      { label: "cached", value: cached, fill: "second", title: "held by the prefix cache alone; given up when needed" },
      { label: "reserved", value: reserved, fill: "third", title: "free, but promised to prompts that are being prefilled" },
      { label: "free", value: free - reserved, fill: "none" },
    ],
    note: [
      `${bytes(metrics.kv_pool_bytes)} of keys and values.`,
      queried ? `Prefix cache: ${percent(metrics.prefix_cache_hits_total, queried)} of ${count(queried)} prompt tokens found.` : "",
    ].join(" "),
  });
}

function showPaths({ metrics, model }) {
  const outcomes = Object.entries(metrics.decode_launches_total ?? {}).sort(([, left], [, right]) => right - left);
  const total = outcomes.reduce((sum, [, value]) => sum + value, 0);
  if (!total) {
    const isDense = model?.decode_storage === "dense";
    const text = isDense ? "Dense storage: attention is mlx-lm's own." : "Nothing has been decoded yet.";
    byId("paths").replaceChildren(element("p", "muted headline", text));
    return;
  }
  const fills = { fused: "first", gather: "third" };
  drawShares(byId("paths"), {
    headline: percent(metrics.decode_launches_total.fused ?? 0, total),
    caption: "of all launches were fused",
    parts: outcomes.map(([label, value]) => ({ label, value, fill: fills[label.split(":")[0]] ?? "second" })),
  });
}

function showTotals({ metrics }) {
  const sum = (name) => Object.values(metrics[name] ?? {}).reduce((total, value) => total + value, 0);
  const listed = (name) =>
    Object.entries(metrics[name] ?? {}).filter(([, value]) => value).map(([key, value]) => `${count(value)} ${key.replaceAll("_", " ")}`).join(", ");
  const totals = [
    ["Requests finished", listed("requests_finished_total") || "0"],
    ["Requests refused", listed("requests_rejected_total") || "0"],
    ["Prompt tokens", count(metrics.prompt_tokens_total)],
    ["Generated tokens", count(metrics.generation_tokens_total)],
    ["Preemptions", count(metrics.preemptions_total)],
    ["Steps", count(metrics.steps_total)],
    ["Steps failed", count(metrics.failed_steps_total)],
  ];
  if (metrics.step_seconds_total) totals.push(["Step time in the model", percent(metrics.model_seconds_total, metrics.step_seconds_total)]);
  if (sum("plan_changes_total")) totals.push(["Plan changes", listed("plan_changes_total")]);
  byId("totals").replaceChildren(
    ...totals.map(([name, value]) => {
      const item = element("div");
      item.append(element("dt", "", name), element("dd", "", value));
      return item;
    }),
  );
}
