"""The public names of the course: notebooks, job scripts and anyone's own tests rely on them."""

import ast
import importlib
from pathlib import Path

import pytest

import course_lib

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "ranks": "Ranks RankError Wait launch record span load_ipython_extension",
    "memory": "count_params model_states activations step_ledger param_parts params_on_rank",
    "speed": "forward_flop train_step_flop six_n_d mfu roof_of OPERATIONS",
    "accumulation": "accumulated_step accumulate_gradients split_micro_batches "
    "by_items by_tokens as_sum",
    "recompute": "recompute recompute_none recompute_full recompute_selective recompute_segments "
    "recompute_some LossScale MixedPrecisionOptimizer",
    "collectives": "broadcast reduce scatter gather all_gather reduce_scatter all_reduce "
    "all_to_all barrier ring_all_gather ring_all_reduce ring_reduce_scatter tree_broadcast "
    "tree_reduce star_broadcast recursive_doubling_all_reduce",
    "data_parallel": "NaiveDDP DataParallel RankSampler weighted_loss broadcast_state fingerprint "
    "ParameterServer LocalSGD",
    "ddp": "DDP Mean make_buckets Bucket bf16_hook TopK PowerSGD",
    "tensor_parallel": "ColumnParallelLinear RowParallelLinear ShardedDropout ShardedLayer "
    "VocabParallelEmbedding VocabParallelHead copy_to_region finish_gradients full_state_dict "
    "gather_columns gather_sequence gather_tensors load_full_state_dict parallel_token_loss "
    "parallelize reduce_from_region scatter_sequence shard_tensors split_columns "
    "vocab_parallel_cross_entropy",
    "pipeline": "gpipe one_f_one_b interleaved naive zero_bubble_h1 Pipeline Stage split_model "
    "run_schedule shares simulate",
    "zero": "ShardedOptimizer ZeRO1 ZeRO2 ZeRO3 FlatLayout Piece",
    "fsdp": "FSDP merge_shards",
    "checkpoint": "save load save_async latest Checkpoint PendingSave Broken all_checkpoints "
    "read_tensor rng_state set_rng_state",
    "context_parallel": "all_gather_attention attend_block block_gradients context_loss merge "
    "parallelize_context positions ring_attention shard shard_batch ulysses_attention unshard",
    "expert_parallel": "dispatch combine parallelize_experts expert_groups ExpertGroups",
    "planner": "Plan Cluster predict search PredictedStep SearchResult find_cluster cluster_for",
    "cost.flops": "train_step_flop mfu",
    "checks": "check",
    "display": "predict reveal show compare memory timeline timelines waiting explore stepper",
    "accumulation.pictures": "graph",
    "accumulation.worked_graph": "graph_states graph_words",
    "tensor_parallel.pictures": "Matrix matrices split_mlp",
    "pipeline.pictures": "pipelines",
    "pipeline.explorer": "schedule_explorer",
    "cli": "main",
}
LESSONS = (
    *("accumulation", "recompute", "memory", "speed", "collectives", "data_parallel", "ddp"),
    *("tensor_parallel", "pipeline", "zero", "fsdp", "planner", "checkpoint", "context_parallel"),
    "expert_parallel",
)


def test_the_public_names_are_there():
    missing = [
        f"{module}.{name}"
        for module, names in PUBLIC.items()
        for name in names.split()
        if not hasattr(importlib.import_module(f"course_lib.{module}"), name)
    ]
    assert not missing


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_lesson_offers_is_listed_and_hides_none_of_its_files(lesson):
    package = importlib.import_module(f"course_lib.{lesson}")
    assert set(PUBLIC[lesson].split()) <= set(package.__all__)
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")}
    assert not files & set(package.__all__)


def test_the_map_names_every_package_once_and_in_the_order_of_the_course():
    lines = [line.split() for line in course_lib.__doc__.splitlines() if line.startswith("    ")]
    named = [word for words in lines for word in words[:1]]
    folders = {
        path.name for path in (ROOT / "course_lib").iterdir() if (path / "__init__.py").exists()
    }
    assert sorted(named) == sorted(folders)
    words = [path.stem.partition("_")[2] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    lessons = [{"experts": "expert_parallel"}.get(word, word) for word in words]
    assert [name for name in named if name in lessons] == lessons


def classes_and_aliases():
    """(name, package) of every public class and type alias."""
    for path in sorted(ROOT.glob("course_*/**/*.py")):
        package = path.relative_to(ROOT).parts[1]
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", "") if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            if name[:1].isupper() and not name.isupper():
                yield name, package


def test_a_name_has_one_meaning_in_the_whole_kit():
    packages: dict[str, set[str]] = {}
    for name, package in classes_and_aliases():
        packages.setdefault(name, set()).add(package)
    assert {name: where for name, where in packages.items() if len(where) > 1} == {}
