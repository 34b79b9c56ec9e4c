// Helpers for elements and for the format of numbers. Never: knows what is shown.

export const $ = (id) => document.getElementById(id);

/** Sets a text only if it differs, so that the browser does not lay it out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A new element with a class and a text. */
export function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Formats a number with few digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 100 || Number.isInteger(value)) return whole.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Formats milliseconds with a fitting unit. */
export function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 100_000) return `${whole.format(ms / 1000)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10_000 ? 1 : 2)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

/** Bytes per second: a number and its unit. */
export function rate(bytes) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return [unit === 0 ? whole.format(bytes) : bytes >= 100 ? bytes.toFixed(0) : bytes.toFixed(1), units[unit]];
}

/** Offers the served models that answer prompts, and keeps the choice. Returns how many there are. */
export function offerModels(models) {
  const list = $("model");
  const names = models.filter((model) => model.task === "generate").map((model) => model.id);
  const before = list.value;
  list.replaceChildren(...(names.length ? names : ["no model yet"]).map((name) => make("option", "", name)));
  if (names.includes(before)) list.value = before;
  list.disabled = names.length < 2;
  return names.length;
}
