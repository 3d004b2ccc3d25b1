"""The batch script that is handed in: one of `cluster/*.sbatch` with profile and job filled in.

Directives that the job names are replaced where they stand; the profile's take the place of the
line `# site`, its modules and variables that of `# environment`. The program and its arguments are
quoted, so a name with blanks or a semicolon in it stays a name.
"""

from course_lib.cluster.job import Job
from course_lib.cluster.profile import Profile


def render(job: Job, profile: Profile) -> str:
    """The whole batch script of this job at this site. `sbatch FILE` needs nothing else.

    Raises: CourseError for a job that does not fit the profile, a script that is not there or has
        no `# site` or `# environment`, and values that would not stay in one directive
    """
    raise NotImplementedError
