"""A learner's own lessons: find and check notebooks, keep progress, update, pack what is handed in.

`check_notebook` puts a learner's exercise cells into the solved notebook and lets nbval run the
result; `learner_work` keeps what a learner has written; `two_notebooks` makes the student's and the
solved notebook of a lesson's source.
"""
