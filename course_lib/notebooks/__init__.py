"""From one source a lesson to the notebooks, and from a learner's notebook to a verdict.

`source` reads and proves `notebooks/source/NN_idea.py`, `build` makes the student and the solved
notebook of it, `work` keeps what a learner has written, `grading` puts a learner's exercise cells
into the solved notebook and lets nbval run the result.
"""
