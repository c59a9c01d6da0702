"""The job spec: what loads, and what each mistake is told."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import SpecError
from headrace.service.spec.job import JobFile, load_job

NEWS = Path(__file__).parents[1] / "golden" / "news.toml"
MULTISLOT = 'pipe.protocol="multislot"'
NO_TIME = 'sources.impressions.event_time={kind="none"}'

TOO_MUCH = "is beyond float32, in which it is used; the greatest is 3.4028234663852886e+38"
TOO_LITTLE = "is so small that float32, in which it is used, cannot hold it; the least is 1.1754943508222875e-38"


def load(*overrides):
    return load_job(NEWS, overrides)


def message(*overrides):
    with pytest.raises(SpecError) as caught:
        load(*overrides)
    return str(caught.value)


def test_the_example_of_the_documentation_loads():
    job = load()
    assert job.spec.name == "news"
    assert job.spec.sources["impressions"].paths == ("data/impressions.jsonl.gz",)
    assert job.spec.sources["impressions"].event_time.field == "ts"
    assert job.spec.model.settings == {"cross_layers": 2, "hidden": [128, 64]}
    assert job.spec.metrics.window == 86_400
    assert job.spec.cluster.num_shards == 0
    assert job.folder == NEWS.parent
    assert job.store == NEWS.parent / "runs" / "news"


def test_workers_are_given_the_spec_as_written_with_overrides_in_place():
    raw = load("passes.wait=250ms", "cluster.trainers=2", "cluster.shards=3").raw
    assert raw["passes"] == {"max_events": 20000, "wait": "250ms"}
    assert raw["cluster"] == {"trainers": 2, "shards": 3}
    assert raw["sources"]["impressions"]["event_time"] == {"field": "ts", "unit": "s"}


def test_an_absolute_store_stays_where_it_is(tmp_path):
    assert load(f"store.path={tmp_path}").store == tmp_path


@pytest.mark.parametrize(
    ("cluster", "shards"),
    [("{}", 0), ("{trainers=1}", 0), ("{trainers=1,shards=2}", 2), ("{trainers=3}", 1), ("{trainers=3,shards=2}", 2)],
)
def test_several_trainers_have_a_shard_unless_more_are_set(cluster, shards):
    assert load(f"cluster={cluster}").spec.cluster.num_shards == shards


def test_checking_a_spec_needs_no_torch():
    code = "import sys, headrace.service.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_schema_describes_every_section():
    schema = JobFile.model_json_schema()
    assert set(schema["properties"]) == {
        "name", "seed", "defaults", "sources", "pipe", "slots", "tasks", "sample", "tables", "model", "train", "dense",
        "join", "passes", "metrics", "cluster", "commit", "store", "exports", "guards", "predict", "evaluator",
        "retrieval", "tuning", "crosses", "without",
    }  # fmt: skip
    assert schema["required"] == ["name", "sources", "pipe", "slots", "tasks", "model", "store"]
    assert schema["additionalProperties"] is False


MISTAKES = {
    'sources.impressions.paths=["a.jsonl","b/*.avro"]': 'sources.impressions: paths.1, "b/*.avro", has no lines: it is '
    "an Avro file, which is not read as a file; write its records as lines of JSON, or as Parquet",
    'sources.impressions.paths=["x.PARQUET"]': 'sources.impressions: paths.0, "x.PARQUET", has no lines: it is '
    'Parquet; set format = "parquet" of its source',
    # in a section itself
    "sorces.a=1": "sorces: unknown key; did you mean 'sources'? known here: cluster, commit, crosses, defaults, "
    "dense, evaluator, exports, guards, join, metrics, model, name, passes, pipe, predict, retrieval, sample, seed, "
    "slots, sources, store, tables, tasks, train, tuning, without",
    "sample.grup=1": "sample.grup: unknown key; did you mean 'group'? known here: group, weight",
    "sources.impressions.event_time.fild=ts": "sources.impressions.event_time.fild: unknown key; did you mean 'field'? "
    "known here: field, kind, slot, unit",
    "slots.1.siz=1": "slots.1.siz: unknown key; did you mean 'size'? known here: buckets, count, counters, cross, "
    "default, from, hash, in, kind, log, name, names, scale, size, split, statistics, time, unit",
    "tables.default.optimizer.rate=1": "tables.default.optimizer.rate: unknown key; known here: epsilon, initial, "
    "kind, lr, per",
    "model.clas=a": "model.clas: unknown key; did you mean 'class'? known here: class, name, settings",
    "train.batch_size=abc": "train.batch_size: Input should be a valid integer (got 'abc')",
    "train.batch_size=true": "train.batch_size: Input should be a valid integer (got True)",
    'train.batch_size="7"': "train.batch_size: Input should be a valid integer (got '7')",
    "train.batch_size=0": "train.batch_size: Input should be greater than or equal to 1 (got 0)",
    "metrics.halves=1": "metrics.halves: Input should be a valid boolean (got 1)",
    "tables.default.dim=1.5": "tables.default.dim: Input should be a valid integer (got 1.5)",
    "tables.default.optimizer.lr=-0.1": "tables.default.optimizer.lr: Input should be greater than 0 (got -0.1)",
    "tables.default.delete_after_days=1000001": "tables.default.delete_after_days: Input should be less than or equal "
    "to 1000000 (got 1000001)",
    "tables.default.slots.user.delete_after_days=99999999999999999999": "tables.default.slots.user.delete_after_days: "
    "Input should be less than or equal to 1000000 (got 99999999999999999999)",
    "exports.main.delta_keep_days=9999999999": "exports.main.delta_keep_days: Input should be less than or equal to "
    "1000000 (got 9999999999)",
    "slots.0.padding=18446744073709551616": "slots.0.padding: Input should be less than 18446744073709551616",
    "tables.default.optimizer.lr=inf": "tables.default.optimizer.lr: Input should be a finite number (got inf)",
    "tables.default.delete_below=1e999": "tables.default.delete_below: Input should be a finite number (got inf)",
    "tables.default.bounds.high=inf": "tables.default.bounds.high: Input should be a finite number (got inf)",
    "dense.clip_norm=nan": "dense.clip_norm: Input should be a finite number (got nan)",
    "exports.main.gates.calibration=[0.5,inf]": "exports.main.gates.calibration.1: Input should be a finite number "
    "(got inf)",
    'model={class="a:B",settings={scales=[1.0,-inf]}}': "model.settings: holds a number that is not finite",
    "metrics.window=0s": "metrics.window: is shorter than 1ms (got '0s')",
    "exports.main.delta=0.0001ms": "exports.main.delta: is shorter than 1ms (got '0.0001ms')",
    "exports.main.base=0h": "exports.main.base: is shorter than 1ms (got '0h')",
    "exports.main.deadline=0s": "exports.main.deadline: is shorter than 1ms (got '0s')",
    "exports.main.command_deadline=0s": "exports.main.command_deadline: is shorter than 1ms (got '0s')",
    "pipe.deadline=0s": "pipe.deadline: is shorter than 1ms (got '0s')",
    "train.step_deadline=0s": "train.step_deadline: is shorter than 1ms (got '0s')",
    "commit.deadline=0s": "commit.deadline: is shorter than 1ms (got '0s')",
    'sources.impressions={kind="kafka",topics=["t"],connect_deadline="0s"}': "sources.impressions.connect_deadline: is "
    "shorter than 1ms (got '0s')",
    "tables.default.optimizer.lr=1e39": f"tables.default.optimizer.lr: {TOO_MUCH} (got 1e+39)",
    "tables.default.decay=1e-50": f"tables.default.decay: {TOO_LITTLE} (got 1e-50)",
    "tables.default.delete_below=1e300": f"tables.default.delete_below: {TOO_MUCH} (got 1e+300)",
    "tables.default.extend_at=1e300": f"tables.default.extend_at: {TOO_MUCH} (got 1e+300)",
    "tables.default.init_range=1e39": f"tables.default.init_range: {TOO_MUCH} (got 1e+39)",
    "tables.default.bounds.high=1e39": f"tables.default.bounds.high: {TOO_MUCH} (got 1e+39)",
    "tables.default.bounds.low=-1e39": f"tables.default.bounds.low: {TOO_MUCH} (got -1e+39)",
    "tables.default.slots.user.lr=1e-50": f"tables.default.slots.user.lr: {TOO_LITTLE} (got 1e-50)",
    'tables.default.optimizer={kind="adam",beta2=0.99999999}': "tables.default.optimizer.beta2: Input should be less "
    "than or equal to 0.9999999403953552 (got 0.99999999)",
    "dense.optimizer.lr=1e39": f"dense.optimizer.lr: {TOO_MUCH} (got 1e+39)",
    "dense.optimizer.epsilon=1e-50": f"dense.optimizer.epsilon: {TOO_LITTLE} (got 1e-50)",
    "dense.clip_norm=1e39": f"dense.clip_norm: {TOO_MUCH} (got 1e+39)",
    "tasks.0.weight=1e-50": f"tasks.0.weight: {TOO_LITTLE} (got 1e-50)",
    "exports.main.base_threshold=1e39": f"exports.main.base_threshold: {TOO_MUCH} (got 1e+39)",
    "tables.default.bounds={low=5.0,high=-5.0}": "tables.default.bounds: low = 5 is above high = -5: no "
    "weight is allowed",
    "tables.default.slots.user.bounds.low=11": "tables.default.slots.user.bounds: low = 11 is above high = 10: no "
    "weight is allowed",
    "exports.main.gates.calibration=[2.0,0.5]": "exports.main.gates.calibration: the lowest, 2, is above the highest, "
    "0.5: no export would pass",
    "slots.0.max_len=99999999999999999999": "slots.0.max_len: Input should be less than or equal to 1048576 (got "
    "99999999999999999999)",
    'sources.impressions={kind="simulated",rate=1e300}': "sources.impressions.rate: Input should be less than or equal "
    "to 1000000000 (got 1e+300)",
    'sources.impressions={kind="simulated",events=9,drift=1e300}': "sources.impressions.drift: Input should be less "
    "than or equal to 1000000 (got 1e+300)",
    "slots.1.size=99999999999": "slots.1.size: Input should be less than or equal to 16777216 (got 99999999999)",
    "cluster.trainers=65": "cluster.trainers: Input should be less than or equal to 64 (got 65)",
    "passes.wait=36501d": "passes.wait: Input should be less than or equal to 3153600000 (got '36501d')",
    "tables.default.memory=9999999TiB": "tables.default.memory: Input should be less than 4611686018427387904 (got "
    "'9999999TiB')",
    "passes.wait=1": "passes.wait: 1 is not of the form '30s'; units are ms, s, m, h, d",
    "passes.wait=1 s": "passes.wait: '1 s' is not of the form '30s'; units are ms, s, m, h, d",
    "metrics.window=1y": "metrics.window: '1y' is not of the form '30s'; units are ms, s, m, h, d",
    "sources.impressions.max_event_bytes=1M": "sources.impressions.max_event_bytes: '1M' is not of the form '512MiB'; "
    "units are B, KiB, MiB, GiB, TiB",
    "slots.0.pooling=avg": "slots.0.pooling: Input should be 'sum', 'mean', 'sqrtn' or 'none' (got 'avg')",
    "pipe.protocol=xml": "pipe.protocol: Input should be 'multislot' or 'arrow' (got 'xml')",
    "sources.impressions.kind=fils": "sources.impressions.kind: 'fils' is none of 'files', 'kafka', 'simulated'; "
    "did you mean 'files'?",
    "slots.0.kind=dens": "slots.0.kind: 'dens' is none of 'sparse', 'dense', 'meta', 'removed'; did you mean 'dense'?",
    "tables.default.optimizer={beta1=0.5}": "tables.default.optimizer.beta1: is a key of kind = 'adam' or "
    "'paddle_adam', which is not set here",
    "pipe=3": "pipe: is a section with keys of its own (got 3)",
    "sources.impressions=3": "sources.impressions: is a section with keys of its own (got 3)",
    'slots=["a"]': "slots.0: is a section with keys of its own (got 'a')",
    "slots.0.names=device": "slots.0.names: is a list, written [..., ...] (got 'device')",
    "pipe={}": "pipe.command: is missing",
    "pipe.command=[]": "pipe.command: The list should have at least 1 item after validation, not 0",
    'slots.0.names=["a b"]': "slots.0: 'a b' is not a name of a slot; a range is written C{1..26}",
    'slots.0.names=["C{3..1}"]': "slots.0: 'C{3..1}' is not a rising range of at most 10,000",
    "slots.1.names=[1]": "slots.1.names.0: Input should be a valid string (got 1)",
    "sources.impressions.event_time={}": "sources.impressions.event_time: needs exactly one of field = \"...\", "
    'slot = "..." or kind = "record" | "none"',
    'model.class="a:B"': 'model: needs either name = "..." or class = "package.module:Class"',
    # not built yet
    'sources.more={kind="simulated",events=5}': (
        "sources.more.event_time: either all sources of a job have an event time, or none"
    ),
    "train.staleness=9": "train.staleness: Input should be less than or equal to 8 (got 9)",
    "train.staleness=-1": "train.staleness: Input should be greater than or equal to 0 (got -1)",
    # what does not go together
    "train.mode=async": 'dense.strategy: "all_reduce" does not work with train.mode = "async", as trainers would meet '
    'in every step; set dense.strategy = "shards"',
    "train={mode='geo',k_steps=4}": 'dense.strategy: "all_reduce" does not work with train.mode = "geo", as trainers '
    'would meet in every step; set dense.strategy = "shards"',
    "dense.strategy=local_sgd": 'dense: strategy = "local_sgd" needs k_steps, the number of steps between two averages',
    "dense={strategy='local_sgd',k_steps=17,adaptive=true}": "dense: k_steps is 17; with adaptive at most 16",
    "dense.k_steps=4": 'dense: k_steps is for strategy = "local_sgd", not for "all_reduce": remove one',
    "dense={strategy='sharded',begin=4}": 'dense: begin is for strategy = "local_sgd", not for "sharded": remove one',
    "dense.group=2": 'dense: group is for strategy = "sharded", not for "all_reduce": remove one',
    "dense={strategy='sharded',overlap=true}": 'dense: strategy = "sharded" does not work with overlap',
    "dense={strategy='local_sgd',k_steps=2,compression='fp16'}": 'dense: strategy = "local_sgd" does not work with '
    "compression",
    'dense={strategy="shards",optimizer={kind="adagrad",weight_decay=0.1}}': 'dense: strategy = "shards" does not work '
    "with optimizer.weight_decay",
    'dense={compression="dgc",dgc={stages=[0.5,0.9],warmup_steps=1}}': "dense.dgc: stages has 2 parts of warmup_steps "
    "= 1: set it to as many steps or more",
    "train.mode=async ; dense.strategy=sharded": 'dense.strategy: "sharded" does not work with train.mode = "async", '
    'as trainers would meet in every step; set dense.strategy = "shards"',
    "dense.pipeline.micro_batches=2": 'dense: pipeline is for strategy = "pipeline", not for "all_reduce": remove one',
    "dense.strategy=pipeline ; model={name='dcn'}": 'model.name: "dcn" has no layers that can be divided, as '
    'dense.strategy = "pipeline" needs; use "deepfm", "wide_deep", "deep_crossing"',
    "dense.strategy=pipeline ; model={class='a:B'} ; tasks=[{name='ctr',label='click',loss='softmax'}]": "tasks.0."
    'loss: "softmax" does not work with dense.strategy = "pipeline"',
    "dense.strategy=pipeline ; model={name='deepfm'} ; train.device=cuda": 'train.device: dense.strategy = '
    '"pipeline" works on CPUs only: set "cpu"',
    "dense={strategy='pipeline',pipeline={stages=2}} ; model={name='deepfm'} ; cluster={trainers=3,shards=1}": "dense."
    "pipeline.stages: 2 trainers share a model, and 3 is no multiple of that: change it, or the number of trainers",
    "dense.strategy=pipeline ; model={name='deepfm',settings={dropout=0.1}}": 'metrics.progressive: "inference" needs '
    'a forward pass of its own for a model with dropout, which dense.strategy = "pipeline" does not make; set '
    '"training"',
    "dense.strategy=allreduce": "dense.strategy: Input should be 'all_reduce', 'local_sgd', 'sharded', 'shards' or "
    "'pipeline' (got 'allreduce')",
    "train.dense=all": "train.dense: Input should be 'all_reduce', 'local_sgd', 'sharded', 'shards' or 'pipeline' (got "
    "'all')",
    "train.dense_optimizer.lr=0.1": "train.dense_optimizer: is the old name of dense.optimizer, which is given, too: "
    "remove train.dense_optimizer",
    "train.clip_norm=0 ; dense.clip_norm=1": "train.clip_norm: is the old name of dense.clip_norm, which is given, "
    "too: remove train.clip_norm",
    "train.clip_norm=0": "train.clip_norm: Input should be greater than 0",
    "dense=3": "dense: is a section with keys of its own (got 3)",
    'train={mode="async",dense="shards",staleness=2}': 'train: staleness counts steps of mode = "sync", and '
    'exchanges of mode = "geo"; mode = "async" has none: remove one',
    "train.mode=geo": 'train: mode = "geo" needs k_steps, the number of batches between two exchanges',
    "train.k_steps=4": 'train: k_steps is for mode = "geo"; mode = "sync" exchanges in every step: remove one',
    'train={early_rows=true,staleness=1}': 'train: early_rows is for mode = "sync" with staleness = 0; other steps do '
    "not wait for the rows of the step before: remove it",
    "train.k_steps=0": "train.k_steps: Input should be greater than or equal to 1 (got 0)",
    'train={mode="geo",k_steps=4} ; dense.strategy=shards': 'dense.optimizer.kind: is "adam"; train.mode = "geo" needs '
    '"sgd", whose differences add up',
    'train={mode="geo",k_steps=4} ; dense={strategy="shards",optimizer={kind="sgd"}}': "tables.default.optimizer.kind: "
    'is "adagrad"; train.mode = "geo" needs "sgd", whose differences add up',
    'train.mode=async ; dense={strategy="shards",buffers="sync_bn"}': 'dense.buffers: "sync_bn" does not work with '
    'train.mode = "async", as trainers would meet in every step; use "rank0"',
    'dense={strategy="shards",optimizer={kind="lamb"}}': 'dense: strategy = "shards" does not work with optimizer.kind '
    '= "lamb", which needs all of a parameter',
    'dense.schedule={kind="warmup_linear",warmup=9,total=9}': "dense.schedule: total = 9 is not above warmup = 9: no "
    "count is left to fall",
    'train.amp_black=["linear"]': 'train: amp_white and amp_black are for amp = "bfloat16" or "float16"; remove them',
    "tables.default.init=glorot": "tables.default.init: Input should be 'uniform', 'normal', 'xavier' or 'zeros' (got "
    "'glorot')",
    "tables.default.clip_norm=0": "tables.default.clip_norm: Input should be greater than 0",
    "train.max_ahead=2": 'train: max_ahead = 2 is for mode = "async"; mode = "sync" has no such bound: remove one',
    'train={mode="async",dense="shards",max_ahead=0}': "train.max_ahead: Input should be greater than or equal to 1 "
    "(got 0)",
    "train.merge.pushes=2": 'train: merge.pushes = 2 is for mode = "async"; in mode = "sync" no push waits for so many '
    "others: remove it",
    'train={mode="async",dense="shards",merge={pushes=0}}': "train.merge.pushes: Input should be greater than or equal "
    "to 1 (got 0)",
    'train={mode="geo",k_steps=4,staleness=2}': 'train: staleness is 2; in mode = "geo" one exchange at a time goes on '
    "beside training: set 1",
    "train={learn=false,learn_until=9}": "train: learn_until says when learning ends, and learn = false that it never "
    "begins; remove one",
    "dense.slice_floats=10000": 'dense: slice_floats is for strategy = "shards"; "all_reduce" has no slices: remove it',
    'dense={strategy="shards",slice_floats=999}': "dense.slice_floats: Input should be greater than or equal to 1000 "
    "(got 999)",
    'dense={strategy="shards",priority="fifo"}': "dense: priority is the order of messages of slice_floats floats: set "
    "that, too, or remove it",
    'train={mode="geo",k_steps=4} ; dense={strategy="shards",slice_floats=10000}': "dense.slice_floats: train.mode = "
    '"geo" exchanges the dense parameters with rows, at most every train.k_steps steps: remove it',
    'dense={strategy="shards",overlap=true,compression="fp16"}': 'dense: strategy = "shards" does not work with '
    "overlap, compression",
    "dense.bucket_bytes=100B": "dense: bucket_bytes must be a multiple of 64, and at most 32MiB",
    "dense.bucket_bytes=33MiB": "dense: bucket_bytes must be a multiple of 64, and at most 32MiB",
    "dense.compression=topk": "dense.compression: Input should be 'none', 'fp16', 'bf16', 'powersgd' or 'dgc' (got "
    "'topk')",
    "dense.dgc.sparsity=0.5": 'dense: dgc is for compression = "dgc", not for "none": remove one',
    "dense={compression='dgc',powersgd={}}": 'dense: powersgd is for compression = "powersgd", not for "dgc": remove '
    "one",
    "dense={compression='dgc',dgc={sparsity=1}}": "dense.dgc.sparsity: Input should be less than 1",
    "dense={compression='powersgd',overlap=true}": 'dense: compression = "powersgd" does not work with overlap, as a '
    "trainer chooses what it sends when the gradient is complete",
    "dense={compression='dgc',hierarchy={group=2},optimizer={kind='lars'}}": 'dense: compression = "dgc" does not work '
    'with hierarchy, as trainers send what each of them chose, optimizer.kind = "lars", which needs all of a gradient',
    "dense={strategy='sharded',hierarchy={group=2}}": 'dense: strategy = "sharded" does not work with hierarchy',
    "dense.hierarchy.group=1": "dense.hierarchy.group: Input should be greater than or equal to 2 (got 1)",
    'train.device="cpu" ; dense.offload="all"': 'dense.offload: train.device = "cpu" has all activations in the memory '
    "of the CPU already: remove it, or use dense.recompute",
    "dense.recompute.segments=0": "dense.recompute.segments: Input should be greater than or equal to 1 (got 0)",
    "dense.average=false": "dense: average = false is for accumulate above 1",
    'dense={buffers="sync_bn",accumulate=2}': 'dense: buffers = "sync_bn" does not work with accumulate above 1, whose '
    "batches trainers do not compute in step",
    'dense={buffers="sync_bn",overlap=true}': 'dense: buffers = "sync_bn" does not work with overlap, as trainers meet '
    "in both during the backward pass",
    "train.staleness=1 ; dense.strategy=shards": 'dense.strategy: "shards" does not work with train.staleness, since '
    "dense parameters are never stale",
    'dense={strategy="shards",optimizer={kind="sgd",weight_decay=0.5}}': 'dense: strategy = "shards" does not work '
    "with optimizer.weight_decay",
    'train={mode="geo",k_steps=4} ; dense={strategy="shards",optimizer={kind="sgd",momentum=0.5}}': "dense.optimizer."
    'momentum: does not work with train.mode = "geo": with momentum differences do not add up; remove it',
    'dense.strategy="shards" ; tables.dense-slices={}': 'tables.dense-slices: dense.strategy = "shards" keeps dense '
    "parameters in a table of this name; rename this one",
    "cluster={trainers=2,shards=0}": "cluster: shards = 0 keeps the rows inside the one trainer; 2 trainers need "
    "shards = 1 or more",
    "cluster.max_message=2GiB": "cluster.max_message: must be at least 1MiB and less than 2GiB (got '2GiB')",
    "cluster.interface=eth0": "cluster: interface = 'eth0' opens the job to other machines; the collectives of its "
    "trainers are neither encrypted nor authenticated, so everybody on that network can read and change them: set "
    "trust_interface = true if that network is yours alone",
    "cluster.listen=10.0.0.1:7070": "cluster: listen = '10.0.0.1:7070' opens the job to other machines; the "
    "collectives of its trainers are neither encrypted nor authenticated, so everybody on that network can read and "
    "change them: set trust_interface = true if that network is yours alone",
    "cluster.listen=here": "cluster.listen: 'here' is not of the form 127.0.0.1:7070",
    # between sections
    'slots.1={name="user",kind="dense"}': "slots.1: slot 'user' is declared twice",
    'slots.0={kind="meta",name="a"} ; slots.1={kind="meta",name="b"}': "slots: all slots are meta: the model "
    "would have no input",
    'slots.1={name="x",share="g",table="other"} ; slots.0.share=g': "slots.1: slots of share group "
    "'g' are in two tables",
    "slots.0.table=defualt": "slots.0.table: there is no table 'defualt'; did you mean 'default'?",
    'tables={"../../x"={}} ; slots.0.table="../../x"': "tables: a table is a folder of commits and exports: name it by "
    "letters, digits, '_' and '-' (got '../../x')",
    "tables.other={}": "tables.other: no slot uses this table; remove it, or name it in a slot",
    "tables.default={dim=0,first_order=false}": "tables.default: dim = 0 and first_order = false leave a row without "
    "a weight",
    'tables.default.first_order_optimizer={kind="sgd"}': "tables.default.first_order_optimizer.kind: is 'sgd'; the "
    "table's optimizer is 'adagrad'",
    'tables.default.first_order_optimizer={per="element"}': "tables.default.first_order_optimizer.per: is 'element', "
    "but the table's optimizer has 'row', which holds for both; remove this key, or set that of the optimizer",
    "tables.default.first_order_optimizer={lr=0.1} ; tables.default.first_order=false": "tables.default."
    "first_order_optimizer: first_order = false leaves rows without a first-order weight; remove this section",
    "tables.default.click=clik": "tables.default.click: there is no slot 'clik'; a meta slot is needed; did you mean "
    "'click'?",
    "tables.default.show=user": "tables.default.show: slot 'user' is sparse; a meta slot is needed",
    "tables.default.slots.usr={}": "tables.default.slots.usr: no slot 'usr' uses this table; did you mean 'user'?",
    'slots.0={name="user",share="g"} ; slots.1={name="device",share="g"} ; tables.default.slots.user.lr=0.1': "tables."
    "default.slots.user: slots 'user' and 'device' share rows, so what is set for one must be set alike for the other",
    "tables.default.extend_at=1 ; tables.default.dim=0": "tables.default.extend_at: a row that waits for its vector "
    "has no vector (dim = 0)",
    "tables.default.slots.user.extend_at=1 ; tables.default.first_order=false": "tables.default.slots.user.extend_at: "
    "a row that waits for its vector has no weight before it (first_order = false)",
    'tables.default.admission=[{kind="count",n=2,memory="1KiB"}]': "tables.default.admission.0.memory: is less than "
    "1MiB, which would leave too few counts to a virtual bucket (got '1KiB')",
    'exports.main={tables=["defualt"]}': "exports.main.tables.0: there is no table 'defualt'; did you mean 'default'?",
    f'{NO_TIME} ; exports.main={{clock="event"}}': 'exports.main.clock: the source has no event_time; use "wall"',
    "exports.a.delta_threshold=1 ; exports.b.delta_threshold=2": "exports.b.delta_threshold: stream 'a' has one above "
    "0 already, and its exports reset the count; only one may",
    "train.learn=false ; exports.main={}": "exports: with train.learn = false the model never changes, "
    "so all exports would be equal; leave exports out (--set exports={})",
    'exports.main={base="1h",delta="2h"}': "exports.main: delta is longer than base, so there would be no delta",
    "tasks.0.label=clik": "tasks.0.label: there is no slot 'clik'; a meta slot is needed; did you mean 'click'?",
    "tasks.0.label=list_length": "tasks.0.label: slot 'list_length' is dense; a meta slot is needed",
    "tasks.0.mask=zzz": "tasks.0.mask: there is no slot 'zzz'; a meta slot is needed; known: click, impression",
    "slots.2.type=string": "tasks.0.label: slot 'click' has type = 'string'; a number is needed",
    'tasks=[{name="a",label="click"},{name="a",label="click"}]': "tasks.1.name: task 'a' is declared twice",
    "sample.group=list_length": "sample.group: slot 'list_length' is dense; a meta or sparse slot is needed",
    "sample.weight=device": "sample.weight: slot 'device' is sparse; a meta slot is needed",
    "metrics.gauc_by=impresion": "metrics.gauc_by: there is no slot 'impresion'; a meta or sparse slot is needed; did "
    "you mean 'impression'?",
    'metrics.slices=["device","devise"]': "metrics.slices.1: there is no slot 'devise'; a meta or sparse slot is "
    "needed; did you mean 'device'?",
    'slots.1={name="event"}': "slots: slot 'event': the arrow protocol reserves this name; rename the slot",
    'slots.0.weighted=true ; slots.1={name="user.weight"}': "slots: slot 'user.weight' has the name of the weights of "
    "slot 'user'; rename it",
    f"{MULTISLOT} ; {NO_TIME} ; slots.0.weighted=true": "slots.0.weighted: weights of signs need protocol = \"arrow\"",
    MULTISLOT: "sources.impressions.event_time: samples of protocol = \"multislot\" cannot be traced to their events; "
    'name a meta slot with the time, or use protocol = "arrow"',
    'sources.impressions.event_time={slot="clik"}': "sources.impressions.event_time.slot: there is no slot 'clik'; "
    "a meta slot is needed; did you mean 'click'?",
    'sources.impressions.event_time={slot="impression"}': "sources.impressions.event_time.slot: 'impression' is not a "
    "meta slot of whole numbers, and floats hold a unix time to 128 s only; use a slot with kind = "
    '"meta", type = "int64"',
    'model={name="deepfm"} ; tables.default={dim=0}': "model.name: deepfm needs vectors: the table of slot 'user' has "
    "dim = 0; use lr, or raise it",
    'sources.impressions.event_time={kind="record"}': "sources.impressions.event_time: lines of files have no time of "
    'their own; name a field or a slot, or kind = "none"',
    "model.name=dcn_v3": "model.name: no model 'dcn_v3'; did you mean 'dcn_v2'? known: lr, fm, deepfm, wide_deep, "
    "deep_crossing, dcn, dcn_v2, dlrm, finalmlp, din, sasrec, two_tower, skip_gram, mmoe, esmm, next_item; for one of "
    'your own, class = "package.module:Class"',
    "model.settings.crosslayers=2": "model.settings.crosslayers: unknown key; did you mean 'cross_layers'? known here: "
    "cross_layers, dropout, hidden, low_rank, structure, towers",
    'model={class="nocolon"}': "model.class: 'nocolon' is not of the form \"package.module:Class\"",
    "train={amp='float16',device='cpu'}": 'train.amp: amp = "float16" needs a GPU; use "bfloat16" or "off" on a CPU',
}  # fmt: skip


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_told_with_its_place_and_what_may_stand_there(overrides):
    told = message(*overrides.split(" ; "))
    assert re.sub(r" \((slots?|task) '[^']+'( and \d+ more)?\)$", "", told) == MISTAKES[overrides]


@pytest.mark.parametrize(
    ("overrides", "end"),
    [
        ("slots.0.pooling=avg", "(got 'avg') (slots 'user' and 3 more)"),
        ("slots.1.size=-1", "(got -1) (slot 'list_length')"),
        ("tasks.0.mask=zzz", "known: click, impression (task 'ctr')"),
        ("slots.0.table=defualt", "did you mean 'default'? (slots 'user' and 3 more)"),
        ('slots.1={name="user",kind="dense"}', "slots.1: slot 'user' is declared twice"),
        ("slots.0.names=device", "(got 'device')"),
        ("slots.0={pooling='avg'}", "(got 'avg')"),
        ("seed=x ; slots.1.siz=1", "time, unit (slot 'list_length')"),
    ],
)
def test_a_mistake_of_a_numbered_slot_or_task_ends_with_its_name(overrides, end):
    first, *_ = sorted(message(*overrides.split(" ; ")).splitlines(), key=lambda line: "slots" not in line)
    assert first.endswith(end), first


def test_all_mistakes_of_all_sections_are_told_at_once():
    assert message("train.batch_size=0", "passes.wait=5", "seed=-1").splitlines() == [
        "seed: Input should be greater than or equal to 0 (got -1)",
        "train.batch_size: Input should be greater than or equal to 1 (got 0)",
        "passes.wait: 5 is not of the form '30s'; units are ms, s, m, h, d",
    ]


@pytest.mark.parametrize("section", ["sources", "pipe", "slots", "tasks", "model", "store", "name"])
def test_a_missing_section_is_told(tmp_path, section):
    import tomllib

    from headrace.config import validate

    raw = tomllib.loads(NEWS.read_text())
    del raw[section]
    with pytest.raises(SpecError) as caught:
        validate(JobFile, raw)
    assert str(caught.value) == f"{section}: is missing"


def test_multislot_takes_its_time_from_a_slot():
    job = load(MULTISLOT, 'slots.2.type="int64"', 'sources.impressions.event_time={slot="impression"}')
    assert job.spec.sources["impressions"].event_time.slot == "impression"


def test_two_tables_may_be_used_by_two_slots():
    job = load('slots.1={name="x",table="other"}', "tables.other={}")
    assert set(job.spec.tables) == {"default", "other"}


def test_nothing_is_a_number_like_others_where_it_means_something():
    none = ("passes.wait=0s", "passes.max_outage=0s", "commit.every=0s", "commit.max_failing=0s")
    zeros = ("delete_below", "extend_at", "init_range", "nonclk_coeff", "optimizer.initial", "optimizer.epsilon")
    job = load(*none, *(f"tables.default.{key}=0" for key in zeros), "exports.main.base_threshold=0")
    assert job.spec.passes.wait == job.spec.commit.every == job.spec.tables["default"].delete_below == 0


def test_numbers_at_their_bounds_are_taken_and_float32_holds_them():
    bounds = "tables.default.bounds={low=-3.4028234663852886e+38,high=-3.4028234663852886e+38}"
    table = load(bounds, "tables.default.optimizer.lr=1.1754943508222875e-38").spec.tables["default"]
    assert -np.inf < np.float32(table.bounds.low) == np.float32(table.bounds.high)
    assert np.float32(table.optimizer.lr) == np.finfo(np.float32).tiny
    adam = load('tables.default.optimizer={kind="adam",beta1=0.9999999403953552}').spec.tables["default"].optimizer
    assert np.float32(adam.beta1) < 1
