"""Train with any strategy of the course on any number of ranks: `python -m course_lib.train`.

`trainer.py` is the loop; read it first. `config.py` holds the settings, `rules.py` what they must
keep, and `run_folder.py` looks at files; `launcher.py` starts the ranks and `mesh.py` arranges
them. `mesh/model_part.py` applies all methods to the model, in one order; `strategies.py` has those
over dp, and `optimizers.py` their optimizers. `forward_backward.py` computes a step's gradients.
`data.py`, `metrics.py`, `progress.py` and `checkpoint.py` serve the loop.

It imports nothing: `python -m course_lib.train --help` needs no torch.
"""
