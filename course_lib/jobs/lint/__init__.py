"""Find mistakes in a job script before it is submitted: `check.py` applies the `rules_*` files."""
