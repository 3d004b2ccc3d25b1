"""For `pytest --nbval notebooks/solved`: compare what pictures say, not their pixels."""

from course_lib.workbooks.nbval_pictures import pytest_collect_file

__all__ = ["pytest_collect_file"]
