// Numbers, times and names for people. What is not known is a dash.

export const NOTHING = "–";

export function num(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 10 ** (size >= 1e9 ? 9 : 6)).toPrecision(3)}${size >= 1e9 ? "G" : "M"}`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return Number(value.toPrecision(Math.max(digits, 2))).toString();
}

export function percent(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? NOTHING : `${(100 * value).toFixed(1)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value < 0.1) return `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
}

export function time(at) {
  if (at === null || at === undefined) return NOTHING;
  const date = new Date(1000 * at);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function ago(at) {
  return at === null || at === undefined ? NOTHING : `${seconds(Math.max(0, Date.now() / 1000 - at))} ago`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}

export function bytes(size) {
  return size < 1024
    ? `${size} B`
    : size < 1 << 20
      ? `${(size / 1024).toFixed(1)} KiB`
      : `${(size / (1 << 20)).toFixed(1)} MiB`;
}
