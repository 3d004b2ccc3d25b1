"""Build, run, grade and update notebooks: from a lesson's source to a verdict on an answer.

`source_rules` proves `notebooks/source/NN_idea.py`, `build` makes the student and the solved
notebook of it, `learner_work` keeps what a learner has written, `grading` puts a learner's exercise
cells into the solved notebook and lets nbval run the result.
"""
