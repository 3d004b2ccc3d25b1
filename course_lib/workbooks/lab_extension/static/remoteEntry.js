// Check and Hand in, two buttons of a notebook in JupyterLab: each saves the notebook, then types
// a command of the course into a terminal, where the learner sees what is run and what it says.
// And the looks of outputs: lines break between words, a right answer has a green mark, and an
// exercise that is not done yet does not look like an error.
//
// JupyterLab loads this file as a container of module federation: it calls `init` with the packages
// that it shares, then `get` for the plugin. Written by hand, it needs neither Node.js nor a build.
// The buttons' places in the toolbar are in schemas/distributed-training-course/buttons.json.
"use strict";
(() => {
  const NAME = "distributed-training-course";
  const TERMINAL = "course"; // one for all notebooks; by its name it is found after a reload
  const COMMANDS = {
    check: ["Check", "Save this notebook and check its exercises (course check)"],
    pack: ["Hand in", "Save this notebook and make the file to hand in (course pack)"],
  };
  const EMPTY_LINE = "\x05\x15"; // Ctrl-E, Ctrl-U: what was half typed must not run with ours
  const KEYS = /[\x00-\x1f\x7f]/; // a terminal would take these for keys, such as Ctrl-C
  const RIGHT = /^\w+-\d+: right\. /m; // what check prints
  const STYLE = `
    .jp-OutputArea .jp-OutputArea-output.jp-RenderedText pre {
      word-break: normal; overflow-wrap: anywhere;
    }
    [data-course] > .jp-OutputArea-output.jp-RenderedText {
      background: none; border-left: 4px solid #767676; padding-left: 8px;
    }
    [data-course="right"] > .jp-OutputArea-output.jp-RenderedText { border-color: #009e73; }
    [data-course="right"] > .jp-OutputArea-output pre::before {
      color: #009e73; content: "\\2713  " / ""; font-weight: bold;
    }`;
  let shared;

  const load = async (name) => (await Object.values(shared[name])[0].get())();

  const quote = (word) =>
    /^[\w@%+=:,./][\w@%+=:,./-]*$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;

  const makePlugin = async () => {
    const { ICommandPalette, Dialog, showDialog } = await load("@jupyterlab/apputils");
    const { PageConfig } = await load("@jupyterlab/coreutils");
    const { INotebookTracker, NotebookActions } = await load("@jupyterlab/notebook");
    const { ITerminalTracker } = await load("@jupyterlab/terminal");
    const { Widget } = await load("@lumino/widgets");

    // The folder and the name of a notebook as a shell needs them, wherever it is.
    const inShell = (path) => {
      const parts = [...PageConfig.getOption("serverRoot").split("/"), ...path.split("/")];
      const file = quote(parts.pop().replace(/^-/, "./-")); // else it would be an option
      const home = parts[0] === "~" ? `${parts.shift()}/` : ""; // a quoted ~ is a folder's name
      return { folder: home + quote(parts.join("/")), file };
    };

    const tell = (title, text, lines = []) => {
      const body = new Widget();
      body.node.append(document.createElement("p"), document.createElement("pre"));
      body.node.firstChild.textContent = text;
      body.node.lastChild.textContent = lines.join("\n");
      return showDialog({ title, body, buttons: [Dialog.okButton()] });
    };

    const verdict = ({ output_type, text, ename }) => {
      if (output_type === "stream" && RIGHT.test([text].flat().join(""))) return "right";
      return ename === "NotDone" ? "not done" : undefined;
    };

    const mark = ({ outputArea }) =>
      outputArea?.model.toJSON().forEach((output, index) => {
        const found = verdict(output);
        if (found) outputArea.widgets[index].node.dataset.course = found;
      });

    const activate = (app, notebooks, palette, tracker) => {
      const { contents, terminals } = app.serviceManager;
      document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
      NotebookActions.executed.connect((_, { cell }) => mark(cell));

      const type = async (line) => {
        await terminals.refreshRunning();
        const isNew = ![...terminals.running()].some(({ name }) => name === TERMINAL);
        let terminal = tracker.find(({ content }) => content.session.name === TERMINAL);
        if (!terminal) {
          terminal = await app.commands.execute("terminal:create-new", { name: TERMINAL });
          app.shell.add(terminal, "down"); // beside notebooks, the next one would open below, too
        }
        app.shell.activateById(terminal.id);
        const { session } = terminal.content;
        const send = (text) => session.send({ type: "stdin", content: [`${EMPTY_LINE}${text}\r`] });
        if (isNew) {
          // A login shell may have set PATH anew; `course` is installed beside this JupyterLab.
          const environment = PageConfig.getOption("staticDir").split("/").slice(0, -4).join("/");
          send(`export PATH="$PATH":${quote(`${environment}/bin`)}; clear`);
        }
        send(line);
      };

      const run = async (verb, panel) => {
        try {
          await panel.context.save();
        } catch {
          return; // JupyterLab has said why it is not saved
        }
        const path = contents.localPath(panel.context.path);
        if (KEYS.test(path)) {
          return tell("Rename it first", "Its name or its folder's has a control character.");
        }
        const { folder, file } = inShell(path);
        if (tracker && terminals.isAvailable()) {
          return type(`cd ${folder} && course ${verb} ${file}`);
        }
        const lines = Object.keys(COMMANDS).map((each) => `course ${each} ${file}`);
        return tell(
          "This JupyterLab has no terminals",
          "The notebook is saved. In a terminal of the course's environment, type what you need:",
          [`cd ${folder}`, ...lines],
        );
      };

      let isBusy = false; // a double click is one click
      for (const [verb, [label, caption]] of Object.entries(COMMANDS)) {
        const command = `course:${verb}`;
        app.commands.addCommand(command, {
          label,
          caption,
          isEnabled: () => notebooks.currentWidget !== null,
          execute: async () => {
            if (isBusy) return;
            isBusy = true;
            try {
              await run(verb, notebooks.currentWidget);
            } finally {
              isBusy = false;
            }
          },
        });
        notebooks.currentChanged.connect(() => app.commands.notifyCommandChanged(command));
        palette?.addItem({ command, category: "Course" });
      }
    };

    return {
      id: `${NAME}:buttons`,
      autoStart: true,
      requires: [INotebookTracker],
      optional: [ICommandPalette, ITerminalTracker],
      activate,
    };
  };

  window._JUPYTERLAB ??= {};
  window._JUPYTERLAB[NAME] = {
    init: (packages) => {
      shared = packages;
    },
    get: async () => {
      const plugin = await makePlugin();
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
