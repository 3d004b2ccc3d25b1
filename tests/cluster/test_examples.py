"""The examples for other schedulers have the form that these ask for. They are not run."""

import copy
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "cluster" / "examples"
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+\w*$"}}
WORDS = {"type": "array", "maxItems": 128, "items": {"type": "string"}}


def table(required: list[str], **properties: object) -> dict[str, object]:
    """The schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


# What of a TrainJob is used here, as pkg/apis/trainer/v1alpha1 of Kubeflow Trainer declares it.
TRAIN_JOB = table(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=table(
        [],
        name={"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        generateName={"type": "string", "pattern": r"^[a-z][-a-z0-9]*$", "maxLength": 57},
    ),
    spec=table(
        ["runtimeRef"],
        runtimeRef=table(
            ["name"],
            name={"type": "string", "minLength": 1, "maxLength": 253},
            kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]},
            apiGroup={"const": "trainer.kubeflow.org"},
        ),
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        trainer=table(
            [],
            image={"type": "string", "maxLength": 500},
            command=WORDS,
            args=WORDS,
            env={
                "type": "array",
                "items": table(["name"], name={"type": "string"}, value={"type": "string"}),
            },
            numNodes={"type": "integer", "minimum": 1},
            resourcesPerNode=table([], requests=QUANTITIES, limits=QUANTITIES),
        ),
    ),
)


@pytest.fixture
def train_job():
    return yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())


def test_the_train_job_has_the_form_that_trainer_asks_for(train_job):
    jsonschema.validate(train_job, TRAIN_JOB)
    resources = train_job["spec"]["trainer"]["resourcesPerNode"]
    gpu = "nvidia.com/gpu"  # Kubernetes wants both alike: GPUs cannot be shared
    assert resources["requests"][gpu] == resources["limits"][gpu]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("apiVersion",), "kubeflow.org/v1"),
        (("kind",), "PyTorchJob"),
        (("metadata", "generateName"), "Many_Nodes"),
        (("spec", "runtimeRef", "name"), ""),
        (("spec", "numNodes"), 2),
        (("spec", "trainer", "numNodes"), "2"),
        (("spec", "trainer", "args"), ["--turns", 3]),
        (("spec", "trainer", "env"), {"OMP_NUM_THREADS": "1"}),
        (("spec", "trainer", "resourcesPerNode", "limits"), {"nvidia.com/gpu": 2}),
    ],
)
def test_a_train_job_of_another_form_is_refused(train_job, where, value):
    broken = copy.deepcopy(train_job)
    inner = broken
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, TRAIN_JOB)


def test_the_examples_say_that_they_were_not_run():
    for path in EXAMPLES.iterdir():
        assert "not run" in " ".join(path.read_text().split("\n")[:3]), path.name


def test_pbs_reads_its_directives():
    lines = (EXAMPLES / "pbs.sh").read_text().split("\n")
    first = next(n for n, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    directives = [n for n, line in enumerate(lines) if re.match(r"#\s*PBS\s+-", line)]
    assert len(directives) == 5
    assert max(directives) < first
    assert not any("#" in lines[n][1:] for n in directives)  # PBS knows no comment after them
    assert "#PBS -l select=2:ncpus=4:ngpus=2:mpiprocs=1" in lines


def played(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The PBS script on a machine where mpiexec only says what it was given."""
    mpiexec = folder / "mpiexec"
    mpiexec.write_text('#!/bin/bash\nprintf "%s\\n" "$PWD" "$@"\n')
    mpiexec.chmod(0o755)
    (folder / "nodes").write_text("node1\nnode2\n")
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PBS_O_WORKDIR": str(folder),
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_JOBID": "1234[7].server",
        **variables,
    }
    return subprocess.run(["bash", EXAMPLES / "pbs.sh"], env=job, capture_output=True, text=True)


def test_pbs_starts_one_torchrun_a_node(tmp_path):
    done = played(tmp_path, PROGRAM="train.py --name 'two words; $(touch trap)'")
    folder, *words = done.stdout.splitlines()
    assert (done.stderr, folder) == ("", str(tmp_path))
    assert words[:4] == ["-n", "2", "torchrun", "--nnodes=2"]
    assert "--rdzv-endpoint=node1:21234" in words
    assert words[-3:] == ["train.py", "--name", "two words; $(touch trap)"]
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("variables", "told"),
    [({"PROGRAM": "train.py --name 'open"}, "quote"), ({}, "need qsub -v PROGRAM")],
    ids=("open quote", "no program"),
)
def test_pbs_starts_nothing_that_it_could_not_read(variables, told, tmp_path):
    done = played(tmp_path, **variables)
    assert done.returncode != 0
    assert (done.stdout, told in done.stderr) == ("", True)
