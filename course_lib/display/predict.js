// The form of predict: a question, a field or choices, and a button. What is committed goes out as
// one message, so that it is whole however busy the kernel is.
function choice(word) {
  const label = document.createElement("label");
  const radio = document.createElement("input");
  Object.assign(radio, { type: "radio", name: "choice", value: word });
  radio.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the arrow keys
  label.append(radio, ` ${word}`);
  return label;
}

function field(label) {
  const input = document.createElement("input");
  Object.assign(input, { type: "text", name: "choice", size: 16, placeholder: "a number" });
  input.autocomplete = "off";
  input.setAttribute("aria-label", label);
  Object.assign(input.style, { font: "inherit", padding: "4px 8px" });
  return input;
}

function render({ model, el }) {
  const form = document.createElement("form");
  const question = document.createElement("legend");
  const group = document.createElement("fieldset");
  const row = document.createElement("div");
  const button = document.createElement("button");
  const answer = document.createElement("p");
  const label = model.get("label");
  const words = model.get("choices");
  question.textContent = model.get("question");
  button.textContent = "Commit";
  button.className = "jupyter-button";
  answer.setAttribute("role", "status");
  Object.assign(question.style, { fontWeight: "bold", padding: 0 });
  Object.assign(group.style, { border: "none", margin: "0 0 8px", padding: 0 });
  Object.assign(row.style, { display: "flex", flexWrap: "wrap", gap: "6px 14px" });
  Object.assign(row.style, { alignItems: "center", padding: "6px 0" });
  answer.style.margin = 0;
  row.append(`${label}:`, ...(words.length ? words.map(choice) : [field(label)]), button);
  group.append(question, row, answer);
  form.append(group);
  el.append(form);

  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // in a notebook Enter alone submits nothing
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    model.send({ commit: new FormData(form).get("choice") });
  });
  const say = () => (answer.textContent = model.get("answer"));
  model.on("change:answer", say);
  say();
}

export default { render };
