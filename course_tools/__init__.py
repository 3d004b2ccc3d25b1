"""What instructors and authors use: build lessons, hand out assignments, grade a class.

Learners never import it, and a student's copy of the course is without it.
"""
