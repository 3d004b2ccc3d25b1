"""Profiles: read as written, wrong ones told in a sentence; what a site shows becomes one."""

import io
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from course_lib.core.errors import CourseError
from course_lib.jobs import site, site_commands
from course_lib.jobs.profile import (
    Limits,
    Profile,
    find_cluster_folder,
    own_path,
    profile_names,
    read_profile,
    save_profile,
)
from course_lib.jobs.site_commands import add_site_commands, pick_profile
from course_lib.jobs.slurm import Slurm
from course_lib.jobs.slurm_time import read_time_s, write_time

NAN = float("nan")
FULL = Profile(
    name="full",
    partition="gpu,long",
    account="project_42",
    qos="gpu-normal",
    gpus_per_node=8,
    gpu_type="h100",
    cpus_per_gpu=12,
    node_memory_gib=480,
    time_limit="2-00:00:00",
    max_nodes=16,
    modules=("gcc/12.2", "cuda/12.6"),
    environment=('source "$HOME/my env/bin/activate"', "export A='b # c'", "x=ä\\n", "y" * 60),
    scratch="/scratch/$USER",
    network_interface="ib0",
    limits=Limits(max_jobs=3, gpu_hours=1.5),
)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course folder of its own, with one profile, and somewhere inside it."""
    save_profile(replace(FULL, name="laptop"), tmp_path / "cluster" / "profiles" / "laptop.toml")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


@pytest.mark.parametrize("profile", [FULL, Profile(name="empty")], ids=lambda one: one.name)
def test_a_saved_profile_is_read_back_the_same(profile, tmp_path):
    path = save_profile(profile, tmp_path / "new" / f"{profile.name}.toml")
    assert read_profile(path) == profile
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_profiles_of_the_course_are_as_save_writes_them(tmp_path):
    folder = find_cluster_folder() / "profiles"
    for name in ("laptop", "slurm", "test"):
        text = save_profile(read_profile(name), tmp_path / "again.toml").read_text()
        assert text.replace("'again'", f"'{name}'") == (folder / f"{name}.toml").read_text()
    assert read_profile("laptop").scheduler == "local"
    assert (read_profile("test").max_nodes, read_profile("test").gpus_per_node) == (2, 2)


def test_the_profile_of_the_site_comes_first(course):
    assert profile_names() == ["laptop"]
    save_profile(replace(FULL, name="site"), own_path())
    assert profile_names() == ["site", "laptop"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('partitoin = "gpu"', "'partitoin' means nothing. Try partition"),
        ('name = "other"', "'name' means nothing"),
        ("[limits]\nmax_job = 3", "'max_job' means nothing. Try max_jobs"),
        ('gpus_per_node = "4"', "gpus_per_node: need a value like 0; got '4'"),
        ('modules = "cuda"', "modules: need a value like []; got 'cuda'"),
        ('partition = "gpu', "need TOML"),
        ("limits = 3", "limits: need a table"),
        ("max_nodes = true", "max_nodes"),
    ],
)
def test_a_wrong_line_is_told_in_a_sentence(text, told, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(CourseError) as raised:
        read_profile(path)
    assert told in str(raised.value)
    assert str(path) in str(raised.value) or "profile wrong" in str(raised.value)


def test_a_profile_that_nobody_can_read_or_write_is_one_sentence(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(CourseError, match=r"folder\.toml: need a profile; it cannot be read"):
        read_profile(tmp_path / "folder.toml")
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match=r"site\.toml: need to write it"):
        save_profile(FULL, tmp_path / "file" / "site.toml")


def test_a_profile_that_is_not_there_names_those_that_are(course):
    with pytest.raises(CourseError, match=r"need one of laptop.*got 'lptop'"):
        read_profile("lptop")


@pytest.mark.parametrize(
    "change",
    [
        {"scheduler": "pbs"},
        {"partition": "gpu --uid=0"},
        {"account": "a\n#SBATCH --uid=0"},
        {"qos": "#"},
        {"gpu_type": "h100;ls"},
        {"gpus_per_node": -1},
        {"max_nodes": 0},
        {"cpus_per_gpu": 1.5},
        {"time_limit": "2:00"},
        {"time_limit": "0:00:00"},
        {"modules": ("a\nb",)},
        {"environment": ("x\ny",)},
        {"scratch": "/a\n/b"},
        {"name": ""},
    ],
    ids=str,
)
def test_what_no_site_has_is_refused(change):
    with pytest.raises(CourseError, match=r"^profile .* need .*; got "):
        replace(FULL, **change)


@pytest.mark.parametrize("change", [{"max_jobs": 0}, {"gpu_hours": -1.0}, {"gpu_hours": NAN}])
def test_limits_that_limit_nothing_or_everything_are_refused(change):
    with pytest.raises(CourseError, match=r"^profile, limits: need .*; got "):
        Limits(**change)


def test_scratch_is_filled_in_for_whoever_asks(monkeypatch):
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    assert FULL.scratch_folder == "/scratch/ada"
    assert replace(FULL, scratch="~/tmp").scratch_folder == "/home/ada/tmp"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120),
        ("2:00", 120),
        ("2:00:00", 7200),
        ("1-2", 93600),
        ("1-2:03", 93780),
        ("1-02:03:04", 93784),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert read_time_s(text) == seconds
    assert read_time_s(write_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-1", "1-", "٢:00:00", "UNLIMITED"])
def test_no_other_time_is_read(text):
    with pytest.raises(CourseError, match="need hours:minutes:seconds"):
        read_time_s(text)


SINFO = """\
cpu*|32|191000|(null)
gpu|64|515000|gpu:h100:4(S:0-1)
gpu|48|257000|gpu:2
old|16+|128000+|gpu:8,shard:80
"""
PARTITIONS = """\
PartitionName=cpu Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=10
PartitionName=gpu Default=NO MaxNodes=3 MaxTime=1-12:00:00 TotalNodes=20
PartitionName=old Default=NO MaxNodes=UNLIMITED MaxTime=30:00 TotalNodes=2
"""


def a_site(command):
    """What the tools of a site print."""
    return {"sinfo": SINFO, "scontrol": PARTITIONS}.get(command[0])


def no_slurm(command):
    return None


def test_a_site_shows_its_partitions():
    gpu, old, cpu = site.find_partitions(a_site)
    assert (gpu.name, gpu.cores, gpu.gpus, gpu.gpu_type) == ("gpu", 64, 4, "h100")
    assert (gpu.memory_gib, old.memory_gib, cpu.memory_gib) == (502, 125, 186)
    assert (gpu.max_nodes, gpu.time_limit) == (3, "1-12:00:00")
    assert (old.name, old.cores, old.gpus, old.gpu_type) == ("old", 16, 8, "")
    assert (old.max_nodes, old.time_limit) == (2, "0:30:00")
    assert (cpu.name, cpu.is_default, cpu.gpus, cpu.time_limit) == ("cpu", True, 0, site.DAY)
    assert site.find_partitions(no_slurm) == site.partition_names(no_slurm) == []
    assert site.partition_names(lambda command: "gpu\ncpu\ngpu\n") == ["cpu", "gpu"]


def test_a_partition_becomes_a_profile():
    gpu, _, cpu = map(site.profile_of, site.find_partitions(a_site))
    assert (gpu.name, gpu.partition, gpu.gpus_per_node, gpu.cpus_per_gpu) == ("site", "gpu", 4, 16)
    assert (cpu.gpus_per_node, cpu.cpus_per_gpu) == (0, 16)
    assert (gpu.node_memory_gib, cpu.node_memory_gib) == (502, 186)


def test_without_slurm_a_profile_is_of_this_machine():
    cpu = site.profile_of_machine(no_slurm)
    assert (cpu.scheduler, cpu.gpus_per_node, cpu.max_nodes) == ("local", 0, 2)
    two = site.profile_of_machine(lambda command: "A100, 40960\nA100, 40960\n")
    assert (two.gpus_per_node, two.max_nodes) == (2, 1)


class TestInit:
    """`course cluster init`."""

    @pytest.fixture(autouse=True)
    def _here(self, course, monkeypatch):
        self.path = course / "cluster" / "profiles" / "site.toml"
        self.monkeypatch = monkeypatch

    def run(self, *arguments, answers="", run=a_site):
        app = typer.Typer()
        add_site_commands(app)
        self.monkeypatch.setattr(site.find_partitions, "__defaults__", (run,))
        self.monkeypatch.setattr(site.profile_of_machine, "__defaults__", (run,))
        return CliRunner().invoke(app, ["cluster", *arguments], input=answers)

    def test_yes_asks_nothing(self):
        done = self.run("init", "--yes")
        assert done.exit_code == 0
        assert "?" not in done.output
        assert read_profile("site").partition == "gpu"

    def test_answers_are_written(self):
        done = self.run("init", answers="old\nproject_42\ncuda py/3.12\n\n1\n4\n0:10:00\n")
        assert done.exit_code == 0
        found = read_profile("site")
        assert (found.partition, found.account, found.modules) == (
            "old",
            "project_42",
            ("cuda", "py/3.12"),
        )
        assert (found.max_nodes, found.gpus_per_node, found.time_limit) == (1, 4, "0:10:00")

    def test_every_question_has_a_default(self):
        assert self.run("init", answers="\n" * 7).exit_code == 0
        assert read_profile("site") == site.profile_of(site.find_partitions(a_site)[0])

    def test_without_slurm_it_is_this_machine(self):
        done = self.run("init", answers="\n\n", run=no_slurm)
        assert "no Slurm here" in done.output
        assert read_profile("site").scheduler == "local"

    def test_nothing_is_overwritten_without_asking(self):
        self.path.write_text("partition = 'mine'\n")
        asked = self.run("init", answers="n\n")
        assert asked.exit_code == 1
        assert "Overwrite it?" in asked.output
        not_asked = self.run("init", "--yes")
        assert isinstance(not_asked.exception, CourseError)
        assert "is there already, and stays" in str(not_asked.exception)
        assert self.path.read_text() == "partition = 'mine'\n"

    def test_a_wrong_answer_writes_nothing(self):
        done = self.run("init", answers="gpuu\n")
        assert "need one of gpu, old, cpu; got 'gpuu'" in str(done.exception)
        assert not self.path.exists()

    def test_profiles_are_listed(self):
        assert "laptop (default)" in self.run("profiles", run=no_slurm).output
        undecided = self.run("profiles").output
        assert "(default)" not in undecided
        assert "No default is chosen yet, and Slurm is here: jobs run there." in undecided
        self.run("init", "--yes")
        listed = self.run("profiles").output
        assert "site (default)" in listed
        assert "laptop " in listed


class TestPick:
    """Where jobs run without --profile."""

    @pytest.fixture
    def pick(self, course, monkeypatch, capsys):
        """Pick a profile on a machine with this Slurm, with this typed where a person can type."""

        def run(name=None, *, slurm=a_site, typed=None):
            monkeypatch.setattr(site.find_partitions, "__defaults__", (slurm,))
            monkeypatch.setattr(Slurm, "is_here", lambda _: slurm is not no_slurm)
            monkeypatch.setattr(site_commands, "is_terminal", lambda: typed is not None)
            monkeypatch.setattr("sys.stdin", io.StringIO(typed or ""))
            return pick_profile(name), "".join(capsys.readouterr())

        return run

    @pytest.mark.parametrize(
        ("typed", "partition", "scheduler"),
        [("\n", "gpu", "slurm"), ("old\n", "old", "slurm"), ("laptop\n", FULL.partition, "local")],
    )
    def test_a_person_is_asked_once(self, pick, course, typed, partition, scheduler):
        save_profile(
            replace(FULL, name="laptop", scheduler="local"), own_path().with_stem("laptop")
        )
        found, told = pick(typed=typed)
        assert (found.name, found.partition, found.scheduler) == ("site", partition, scheduler)
        assert "Partition, or laptop [gpu]: " in told
        assert f"{own_path()} remembers it" in told
        assert pick(typed="") == (found, "")

    def test_a_script_gets_slurm_and_is_told_each_time(self, pick):
        for _ in range(2):
            found, told = pick()
            assert (found.scheduler, found.partition) == ("slurm", "gpu")
            assert "taking its partition gpu. Otherwise: --profile laptop" in told
        assert not own_path().exists()

    def test_where_a_profile_is_named_or_no_slurm_is_nothing_is_asked(self, pick):
        assert pick("laptop", typed="old\n") == (read_profile("laptop"), "")
        assert pick(slurm=no_slurm, typed="old\n") == (read_profile("laptop"), "")

    def test_an_answer_that_cannot_be_kept_still_counts(self, pick, monkeypatch):
        def refuses(*_):
            raise CourseError("a copy of the course that is yours")

        monkeypatch.setattr("course_lib.jobs.profile.save_profile", refuses)
        found, told = pick(typed="old\n")
        assert (found.partition, "that is yours" in told) == ("old", True)

    def test_a_slurm_without_partitions_is_told(self, pick):
        with pytest.raises(CourseError, match=r"it names none\. Try --profile laptop"):
            pick(slurm=lambda _: "")
