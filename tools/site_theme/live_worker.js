/* Runs the course's formulas in Python, away from the page; all files are beside this one. */
import { loadPyodide } from "./pyodide/pyodide.mjs";

const beside = (name) => new URL(name, import.meta.url);
const say = (progress) => postMessage({ progress });

async function start() {
  say("Loading Python (13 MB, once) …");
  const python = await loadPyodide({ indexURL: beside("pyodide/").href });
  say("Loading the course's formulas …");
  const archive = await fetch(beside("course.zip"));
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  python.runPython(`
import importlib, json
def answer(module, name, values):
    return getattr(importlib.import_module(module), name).answer(json.loads(values))
`);
  say("Computing …");
  return python.globals.get("answer");
}

const started = start();
onmessage = async ({ data: { id, where, values } }) => {
  try {
    const answer = await started;
    postMessage({ id, answer: answer(...where, values) });
  } catch (problem) {
    postMessage({ id, failed: `It could not be computed: ${problem.message}` });
  }
};
