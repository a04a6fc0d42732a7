// Looks at the server, kept for a while, and what follows from two of them: rates and percentiles.

export const SHOWN_S = 120;
const PERCENTILE_WINDOW_S = 30;
const RATE_WINDOW_S = 5;

export class History {
  #looks = [];

  // Adds a look. A server that was started anew begins a new history.
  add(status, now) {
    const last = this.#looks.at(-1);
    if (last && status.uptime_s < last.status.uptime_s) this.#looks = [];
    this.#looks.push({ now, status });
    while (this.#looks[0].now < now - SHOWN_S - PERCENTILE_WINDOW_S) this.#looks.shift();
  }

  // What a counter grows by in a second; null before there are two looks.
  rate(name) {
    const [before, latest] = this.#pair(RATE_WINDOW_S);
    if (!before) return null;
    return (latest.status.metrics[name] - before.status.metrics[name]) / (latest.now - before.now);
  }

  // A percentile of what a histogram has counted lately, interpolated in its bucket; null when it has counted nothing.
  percentile(name, part) {
    const [before, latest] = this.#pair(PERCENTILE_WINDOW_S);
    const buckets = latest?.status.metrics[name]?.buckets;
    if (!buckets) return null;
    const earlier = before?.status.metrics[name]?.buckets;
    const counts = buckets.map(([, total], index) => total - (earlier ? earlier[index][1] : total));
    return interpolate(buckets.map(([bound]) => bound), counts, part);
  }

  #pair(seconds) {
    const latest = this.#looks.at(-1);
    const before = this.#looks.find((look) => look !== latest && look.now >= latest.now - seconds - 0.5);
    return [before, latest];
  }
}

// As Prometheus' histogram_quantile does; what lies beyond the last bound counts as that bound.
export function interpolate(bounds, cumulative, part) {
  const total = cumulative.at(-1);
  if (!(total > 0)) return null;
  const rank = part * total;
  const index = cumulative.findIndex((value) => value >= rank);
  const low = index === 0 ? 0 : bounds[index - 1];
  if (bounds[index] === null) return low;
  const below = index === 0 ? 0 : cumulative[index - 1];
  return low + ((bounds[index] - low) * (rank - below)) / (cumulative[index] - below);
}
