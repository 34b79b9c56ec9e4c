// The theme, which all pages of this server share. Owns: the choice, kept in the browser.
import { $ } from "./words.js";

/** Follows the choice; `changed` is called after each change. */
export function followTheme(changed = () => {}) {
  const theme = $("theme");
  const dress = () => {
    if (theme.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
    localStorage.setItem("cleave-theme", theme.value);
    changed();
  };
  theme.value = localStorage.getItem("cleave-theme") ?? "auto";
  theme.addEventListener("change", dress);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => changed());
  dress();
}
