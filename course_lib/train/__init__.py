"""Train with any strategy of the course on any number of ranks: `python -m course_lib.train`.

`trainer.py` is the loop; read it first. `config.py` holds the settings, `rules.py` what they must
keep, and `run_folder.py` looks at files; `launcher.py` starts the ranks and `mesh.py` arranges
them. `strategies.py` wraps the model, `optimizers.py` its optimizer, `model_part.py` a rank's part
of it; `forward_backward.py` computes a step's gradients. `data.py`, `metrics.py`, `progress.py` and
`checkpoint.py` serve the loop.

It imports nothing: `python -m course_lib.train --help` needs no torch.
"""
