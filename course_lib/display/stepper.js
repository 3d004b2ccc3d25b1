// Steps through frames of moving shards. The pictures come drawn; here they are shown in turn, and
// between two of them the travelling shards are moved along their arrows.
const STEP_MS = 1100;
const PAUSE_MS = 500;

function button(words, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = words;
  made.setAttribute("aria-label", label);
  made.className = "jupyter-button lm-Widget";
  return made;
}

function render({ model, el }) {
  const frames = model.get("frames");
  const title = document.createElement("strong");
  title.textContent = model.get("title");
  const stage = document.createElement("div");
  const bar = document.createElement("div");
  const back = button("Back", "one step back");
  const play = button("Play", "play all steps");
  const step = button("Step", "one step forward");
  const range = document.createElement("input");
  const words = document.createElement("p");
  Object.assign(range, { type: "range", min: 0, max: frames.length - 1, step: 1, value: 0 });
  range.setAttribute("aria-label", "step");
  range.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the arrow keys
  words.setAttribute("aria-live", "polite");
  Object.assign(bar.style, { display: "flex", gap: "6px", alignItems: "center" });
  stage.style.overflowX = "auto";
  bar.append(back, play, step, range);
  el.append(title, stage, bar, words);

  let at = 0;
  let playing = false;
  let running = 0; // the number of the animation that may still draw

  function show(index) {
    at = Math.max(0, Math.min(frames.length - 1, index));
    stage.innerHTML = frames[at].svg;
    words.textContent = frames[at].text;
    range.value = at;
    range.setAttribute("aria-valuetext", frames[at].text);
    back.disabled = at === 0;
    step.disabled = at === frames.length - 1;
  }

  function stop() {
    running += 1;
    playing = false;
    play.textContent = "Play";
    play.setAttribute("aria-label", "play all steps");
  }

  function move(share) {
    const ways = stage.querySelectorAll(".way");
    stage.querySelectorAll(".traveller").forEach((shard, index) => {
      const way = ways[index];
      const point = way.getPointAtLength(share * way.getTotalLength());
      shard.setAttribute("visibility", "visible");
      shard.setAttribute("transform", `translate(${point.x},${point.y})`);
    });
  }

  function forward(then) {
    const mine = ++running;
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    const begin = performance.now();
    function tick(now) {
      if (mine !== running) return;
      const share = still ? 1 : Math.min(1, Math.max(0, now - begin) / STEP_MS);
      move(share * share * (3 - 2 * share));
      if (share < 1) return requestAnimationFrame(tick);
      show(at + 1);
      if (then) setTimeout(() => mine === running && then(), still ? STEP_MS : PAUSE_MS);
    }
    requestAnimationFrame(tick);
  }

  function next() {
    if (at < frames.length - 1) forward(next);
    else stop();
  }

  play.addEventListener("click", () => {
    if (playing) {
      stop();
      return show(at);
    }
    playing = true;
    play.textContent = "Pause";
    play.setAttribute("aria-label", "pause");
    if (at === frames.length - 1) show(0);
    next();
  });
  step.addEventListener("click", () => {
    stop();
    show(at);
    forward();
  });
  back.addEventListener("click", () => {
    stop();
    show(at - 1);
  });
  range.addEventListener("input", () => {
    stop();
    show(Number(range.value));
  });
  show(0);
  return stop;
}

export default { render };
