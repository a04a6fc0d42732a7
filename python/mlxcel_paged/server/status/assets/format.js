// Numbers as people read them. A value that is not known is a dash.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (value) => (Number.isFinite(value) ? whole.format(value) : "–");

export const rate = (value) => (Number.isFinite(value) ? (value < 100 ? short : whole).format(value) : "–");

export const percent = (part, total) => {
  if (!(total > 0)) return "–";
  const value = (100 * part) / total;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  // 100 % means all of it.
  return value > 99.9 && part < total ? "> 99.9 %" : `${tenths.format(value)} %`;
};

export const latency = (seconds) => {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${short.format(seconds * 1e3)} ms` : `${short.format(seconds)} s`;
};

export const duration = (seconds) => {
  if (seconds < 60) return `${count(Math.floor(seconds))} s`;
  if (seconds < 3600) return `${count(Math.floor(seconds / 60))} min`;
  if (seconds < 86400) return `${count(Math.floor(seconds / 3600))} h ${count(Math.floor((seconds % 3600) / 60))} min`;
  return `${count(Math.floor(seconds / 86400))} d ${count(Math.floor((seconds % 86400) / 3600))} h`;
};

export const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${short.format(value)} ${units[unit]}`;
};
