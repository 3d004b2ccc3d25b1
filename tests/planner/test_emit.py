"""Emitted files: what each program is told, what it cannot do, and that nothing is overwritten."""

import shlex
from dataclasses import replace

import pytest

from course_lib.core import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS, find_model
from course_lib.jobs.lint.check import lint_job
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.emit import emit, find_launches
from course_lib.planner.launches import course_train, megatron_lm, torchtitan
from course_lib.planner.searching import valid_plans
from course_lib.train.config import SCHEDULES

LLAMA = find_model("llama-70b")
PIPELINE = Plan(
    parallelism=Parallelism(dp=2, tp=8, pp=4, sequence_parallel=True, zero=1),
    schedule="interleaved",
    num_model_chunks=5,
    micro_batch=2,
    num_micro_batches=16,
    seq=4096,
)
SHARDED = Plan(micro_batch=1, num_micro_batches=4, seq=4096, recompute="full").with_axes(
    dp=16, tp=4, sequence_parallel=True, zero=3
)


def predicted(plan, model=LLAMA, cluster="hf-h100"):
    found = find_cluster(cluster)
    nodes = -(-plan.world_size // found.gpus_per_node)
    return predict(model, found.with_nodes(nodes), plan)


def options_of(launch):
    """The arguments as a parser reads them: by name; what comes without a value is there."""
    found, name = {}, ""
    for word in launch.arguments:
        if word.startswith("--"):
            name = word.removeprefix("--")
            assert name not in found
            found[name] = ""
        else:
            found[name] = word
    return found


def test_course_train_gets_the_mesh_the_schedule_and_the_batch():
    launch = course_train(predicted(PIPELINE))
    assert options_of(launch) == {
        "model": "llama-70b",
        "mesh": "pp=4,dp=2,tp=8",
        "strategy": "zero1",
        "seq": "4096",
        "global-batch": "64",
        "micro-batch": "2",
        "schedule": "interleaved",
        "model-chunks": "5",
        "dtype": "bfloat16",
        "sequence-parallel": "",
    }
    (masters,) = launch.differs
    assert "without fp32 masters" in masters
    sequences = course_train(predicted(PIPELINE.with_axes(dp=1, cp=2, zero=0)))
    assert options_of(sequences)["mesh"] == "pp=4,dp=1,cp=2,tp=8"
    assert options_of(sequences)["strategy"] == "ddp"
    again = course_train(predicted(PIPELINE.with_axes(zero=2)))
    assert options_of(again)["strategy"] == "ddp"
    assert "ZeRO stage 2 not with interleaved, so it uses ddp" in again.differs[0]


@pytest.mark.parametrize(
    ("zero", "strategy"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "fsdp")]
)
def test_course_train_shards_as_the_plan_does(zero, strategy):
    plan = Plan(micro_batch=2, num_micro_batches=2).with_axes(dp=8, zero=zero)
    launch = course_train(predicted(plan, find_model("llama-8b")))
    found = options_of(launch)
    assert found["strategy"] == strategy
    assert "schedule" not in found
    assert ("compute-dtype" in found) == (zero == 3) == ("dtype" not in found)
    assert len(launch.differs) == (zero != 3)
    full = course_train(predicted(replace(plan, recompute="full"), find_model("llama-8b")))
    assert "does not recompute" in full.differs[0]


def test_megatron_gets_the_norms_and_the_rope_of_the_model():
    plan = Plan(seq=1024)
    found = options_of(megatron_lm(predicted(plan, find_model("llama-8b"))))
    assert found["rope-scaling-factor"] == "8.0"
    assert "use-rope-scaling" in found
    assert "norm-epsilon" not in found  # it is Megatron's default
    llama = find_model("llama-8b")
    plain = replace(llama, rope=replace(llama.rope, scaling=()), norm_eps=1e-6)
    found = options_of(megatron_lm(predicted(plan, plain)))
    assert found["norm-epsilon"] == "1e-06"
    assert "use-rope-scaling" not in found
    longer = {**dict(llama.rope.scaling), "original_max_position_embeddings": 4096}
    other = replace(llama, rope=replace(llama.rope, scaling=tuple(sorted(longer.items()))))
    with pytest.raises(CourseError, match="a scaled rope that is not Llama 3's"):
        megatron_lm(predicted(plan, other))


def test_megatron_gets_the_plan_and_the_model():
    found = options_of(megatron_lm(predicted(replace(PIPELINE, recompute="full"))))
    sizes = {
        "tensor-model-parallel-size": 8,
        "pipeline-model-parallel-size": 4,
        "num-layers-per-virtual-pipeline-stage": 80 // 4 // 5,
        "micro-batch-size": 2,
        "global-batch-size": 64,
        "num-layers": 80,
        "num-query-groups": 8,
        "seq-length": 4096,
        "recompute-granularity": "full",
        "recompute-num-layers": 1,
    }
    assert {name: found[name] for name in sizes} == {name: str(v) for name, v in sizes.items()}
    flags = {"sequence-parallel", "use-distributed-optimizer", "bf16", "swiglu"}
    flags |= {"disable-bias-linear", "untie-embeddings-and-output-weights", "group-query-attention"}
    assert all(found[name] == "" for name in flags)
    gpt = options_of(megatron_lm(predicted(Plan(seq=1024), find_model("gpt2-medium"))))
    assert not flags - {"bf16"} & set(gpt)
    assert gpt["position-embedding-type"] == "learned_absolute"
    assert "num-layers-per-virtual-pipeline-stage" not in gpt


def test_torchtitan_gets_the_plan():
    found = options_of(torchtitan(predicted(SHARDED)))
    wanted = {
        "job.config_file": "torchtitan/models/llama3/train_configs/llama3_70b.toml",
        "training.local_batch_size": "1",
        "training.global_batch_size": "64",
        "parallelism.data_parallel_shard_degree": "16",
        "parallelism.data_parallel_replicate_degree": "1",
        "parallelism.fsdp_reshard_after_forward": "always",
        "parallelism.tensor_parallel_degree": "4",
        "activation_checkpoint.mode": "full",
    }
    assert {name: found[name] for name in wanted} == wanted
    staged = PIPELINE.with_axes(zero=2)
    piped = options_of(torchtitan(predicted(staged)))
    assert piped["training.local_batch_size"] == "32"  # all micro-batches of a pipeline
    assert piped["parallelism.pipeline_parallel_microbatch_size"] == "2"
    assert piped["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert piped["parallelism.pipeline_parallel_layers_per_stage"] == "4"
    copies = options_of(torchtitan(predicted(Plan().with_axes(dp=4), find_model("llama-8b"))))
    assert copies["parallelism.data_parallel_replicate_degree"] == "4"
    assert copies["parallelism.data_parallel_shard_degree"] == "1"


GPT = find_model("gpt2-medium")


@pytest.mark.parametrize(
    ("program", "plan", "model", "says"),
    [
        (course_train, replace(PIPELINE, precision="fp8"), LLAMA, "need bf16 or fp32; got fp8"),
        (course_train, Plan(), replace(LLAMA, name="mine"), "need a model that is a preset"),
        (course_train, Plan(seq=2048), replace(GPT, max_seq=2048), "a model that is a preset"),
        (megatron_lm, SHARDED, LLAMA, "core_v0.14.0: need ZeRO stage 0 or 1; got stage 3"),
        (
            megatron_lm,
            Plan(schedule="zb-h1", num_micro_batches=4).with_axes(pp=4),
            LLAMA,
            "need 1f1b or interleaved; got zb-h1",
        ),
        (
            megatron_lm,
            Plan(num_micro_batches=8).with_axes(pp=7),
            LLAMA,
            "need stages of equally many layers; got 80 layers and pp7",
        ),
        (torchtitan, PIPELINE, LLAMA, "need ZeRO stage 2 or 3, or stage 0 with dp=1"),
        (torchtitan, PIPELINE.with_axes(zero=0), LLAMA, "got stage 0 and dp=2"),
        (torchtitan, Plan(seq=1024), GPT, "torchtitan v0.2.2: need one of llama-8b"),
        (torchtitan, SHARDED.with_axes(sequence_parallel=False), LLAMA, "sequence parallelism"),
        (torchtitan, replace(SHARDED, precision="fp16"), LLAMA, "need bf16 or fp32; got fp16"),
        (
            torchtitan,
            Plan(schedule="zb-h1", num_micro_batches=4).with_axes(pp=4),
            LLAMA,
            "need one of 1f1b, gpipe, interleaved, zb-v; got zb-h1",
        ),
    ],
)
def test_what_a_program_cannot_train_is_one_sentence(program, plan, model, says):
    with pytest.raises(CourseError) as caught:
        program(predicted(plan, model))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


def test_course_train_takes_every_plan_that_a_search_finds():
    """Its own checks have passed it; and the programs together leave no plan of Llama out."""
    cluster, count = find_cluster("selene-a100"), 0
    for plan in list(valid_plans(find_model("llama-8b"), cluster, 16, 2048))[::5]:
        launches, refusals = find_launches(predict(find_model("llama-8b"), cluster, plan))
        assert launches[0].name == "course_train"
        assert len(launches) + len(refusals) == 3
        mesh = dict(part.split("=") for part in options_of(launches[0])["mesh"].split(","))
        sizes = {axis: str(getattr(plan.parallelism, axis)) for axis in ("pp", "dp", "tp")}
        assert mesh == sizes
        assert options_of(launches[0]).get("schedule", "1f1b") in SCHEDULES
        count += 1
    assert count > 30


def test_the_folder_has_a_note_arguments_and_scripts(tmp_path):
    paths = emit(predicted(PIPELINE), tmp_path / "plan")
    names = [path.name for path in paths]
    assert names == [
        *("plan.md", "course_train.args", "course_train.sbatch"),
        *("megatron_lm.args", "megatron_lm.sbatch"),
    ]
    note, arguments, script, _, megatron = (path.read_text() for path in paths)
    words = shlex.split(arguments)
    assert tuple(words) == course_train(predicted(PIPELINE)).arguments
    assert "--model-chunks 5" in arguments.splitlines()
    assert f"set -- -m course_lib.train {shlex.join(words)}\n" in script
    assert "#SBATCH --nodes=8" in script
    assert "#SBATCH --gpus-per-node=8" in script
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in megatron
    assert str(tmp_path / "plan" / "megatron_lm.sbatch") in note
    assert "- torchtitan v0.2.2: need ZeRO stage 2 or 3" in note
    assert "without fp32 masters" in note
    assert note.count("So the predicted memory and time do not hold for it.") == 1
    assert "\nTimes assume the constants of nanotron" in note
    assert "the median error of the predicted step is 2.2 %" in note
    assert "schedule interleaved; 4096 tokens" in note
    assert "| 0.000 |" not in note
    assert f"| {predicted(PIPELINE).peak_s:.3f} | the same FLOP at the GPU's peak" in note
    for name, text in (("course_train", script), ("megatron_lm", megatron)):
        head = text.partition("#SBATCH")[0]
        assert f"#   sbatch {tmp_path / 'plan' / name}.sbatch\n" in head
        assert "cluster/" not in head
        assert text.count("#!") == 1
    why = "--vocab-size 128255: the null tokenizer adds one token"
    assert why in megatron.partition("#SBATCH")[0]
    assert why in note
    assert "Without Slurm" not in note  # eight nodes
    for path in (paths[2], paths[4]):
        assert lint_job(path.read_text(), tmp_path / "plan") == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "plan.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine, too")
    with pytest.raises(CourseError, match=r"without the files of a plan; got one with plan\.md\."):
        emit(predicted(PIPELINE), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "plan.md"]
    assert (tmp_path / "plan.md").read_text() == "mine"


def test_a_plan_that_no_program_trains_is_refused(tmp_path):
    nowhere = Plan(schedule="zb-h2", num_micro_batches=8).with_axes(pp=4)
    with pytest.raises(CourseError, match="need a plan that a program trains") as caught:
        emit(predicted(nowhere), tmp_path / "plan")
    assert str(caught.value).count(": need ") == 4
    assert not (tmp_path / "plan").exists()
    with pytest.raises(CourseError, match="ranks that fill nodes of 8 GPUs; got 12"):
        emit(predicted(Plan().with_axes(dp=12), MODELS["gpt2-medium"]), tmp_path / "plan")


def test_a_laptop_asks_for_no_gpus(tmp_path):
    plan = Plan(micro_batch=1, seq=64).with_axes(dp=2)
    paths = emit(predicted(plan, find_model("tiny"), "laptop"), tmp_path)
    script = paths[2].read_text()
    assert "gpus-per-node=" not in script.split("# environment")[0]
    assert "export RANKS_PER_NODE=2" in script
    started = "`torchrun --standalone --nproc-per-node 2 -m course_lib.train --model tiny"
    assert f"Without Slurm: {started}" in paths[0].read_text()
    assert "dtype" not in paths[1].read_text()  # fp32, as the prediction has it
