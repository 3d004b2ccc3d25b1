// The picture under the sliders of explore: one image that stays in place, one text that is read out.
// ipywidgets gives its sliders no name for those who cannot see the label beside them.
function nameSliders(box) {
  for (const handle of box?.querySelectorAll("[role=slider]") ?? []) {
    const label = handle.closest(".jupyter-widgets")?.querySelector("label");
    handle.setAttribute("aria-label", label?.textContent ?? "");
  }
}

// For a screen reader alone.
const READ_OUT = "position: absolute; width: 1px; overflow: hidden; clip-path: inset(50%)";

function render({ model, el }) {
  const image = document.createElement("img");
  image.style.maxWidth = "100%";
  const words = document.createElement("p");
  words.setAttribute("aria-live", "polite");
  el.append(image, words);

  let url = null;
  function update() {
    const { png, width, alt, is_title: isTitle, failed } = model.get("picture");
    const old = url;
    words.textContent = alt;
    words.style.cssText = isTitle && !failed ? READ_OUT : "white-space: pre-wrap";
    image.alt = failed ? "" : alt;
    image.style.opacity = failed ? 0.25 : 1;
    if (failed) return;
    url = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    image.width = width;
    image.onload = () => old && URL.revokeObjectURL(old);
    image.src = url;
  }
  model.on("change:picture", update);
  update();
  requestAnimationFrame(() => nameSliders(el.closest(".widget-vbox")));
  return () => url && URL.revokeObjectURL(url);
}

export default { render };
