/* What is wider than its place can be scrolled with the keyboard, too. */
"use strict";

const SCROLLS = "pre, .table-wrapper, mjx-container[display='true'], .cell_output > .output";

function name(part) {
  if (part.matches("pre")) return "code or output, scrolls";
  return part.matches(".table-wrapper") ? "table, scrolls" : "formula or output, scrolls";
}

function makeReachable() {
  for (const part of document.querySelectorAll(SCROLLS)) {
    const wide = part.scrollWidth > part.clientWidth + 1 || part.scrollHeight > part.clientHeight + 1;
    if (wide && !part.hasAttribute("tabindex")) {
      part.tabIndex = 0;
      part.setAttribute("role", "group");
      part.setAttribute("aria-label", name(part));
    }
  }
}

window.addEventListener("load", makeReachable);
window.addEventListener("resize", makeReachable);
document.addEventListener("toggle", makeReachable, true);
