"""What the pipelines read is what the arithmetic says, in both modes, from any step."""

import dataclasses
import gc
import itertools

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import choices, pipeline, shards
from ctl.data.bad_records import BadRecords
from ctl.data.index import load_index
from ctl.data.records import make_source
from ctl.data.streams import CompressedFile
from ctl.experiment import Experiment, Feature
from ctl.paths import find_files
from experiments import bert_mlm
from tests import bert_records

GLOBAL_BATCH = 12
COUNTS = [40, 41, 39, 40, 40, 42]


def make_files(folder, compression):
    """A source of records in `folder`."""
    glob = bert_records.write_files(folder, COUNTS, compression=compression)
    index = load_index(find_files(glob, 'data.train'))
    config = bert_mlm.get_config()
    for key, value in bert_records.FITTING.items():
        config.model[key.removeprefix('model.')] = value
    experiment = Experiment(bert_mlm.make_features(config.model), models={}, objectives=[])
    return make_source(index, experiment, BadRecords(config.data, print))


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp('plain'), ('',))


@pytest.fixture(scope='module')
def mixed_source(tmp_path_factory):
    """Plain, gzip and zlib files in one glob, and in one shard."""
    return make_files(tmp_path_factory.mktemp('mixed'), ('', '', 'GZIP', 'GZIP', 'ZLIB', ''))


def make_layout(source, logical_shards=6, shard_by='file'):
    index = source.index
    return shards.Layout(index.counts, GLOBAL_BATCH, logical_shards, shard_by, 3, 4, 16, index.breaks, index.sequential)


def make_strategy(replicas):
    return tf.distribute.MirroredStrategy(
        [f'/cpu:{i}' for i in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def distributed_batches(strategy, dataset_fn, per_replica, steps):
    """[step][replica] batches, as strategy.run would get them."""
    iterator = iter(pipeline.distribute(strategy, dataset_fn, per_replica))
    for _ in range(steps):
        batch = next(iterator)
        local = {name: strategy.experimental_local_results(value) for name, value in batch.items()}
        yield [{name: value[r].numpy() for name, value in local.items()} for r in range(strategy.num_replicas_in_sync)]


def check_what_is_fed(source, layout, replicas, per_replica, first_step):
    """45 steps, record by record, against the arithmetic and the files."""
    dataset_fn = pipeline.make_train_dataset_fn(source, layout, first_step)
    fed = distributed_batches(make_strategy(replicas), dataset_fn, per_replica, steps=45)
    for step, batches in enumerate(fed, start=first_step):
        expected = layout.replica_records(step, replicas, replicas if per_replica else 1)
        assert [b['record'].tolist() for b in batches] == [e.tolist() for e in expected]
        for batch in batches:
            assert np.all(batch['example_weight'] == 1)
            for row, record in enumerate(batch['record']):
                example = tf.train.Example.FromString(source.index.read(int(record)))
                wanted = example.features.feature['input_ids'].int64_list.value
                assert batch['input_ids'][row].tolist() == list(wanted)


def quick(of_each, *some):
    """All combinations: `some` of them in every run of the tests, the others among the long proofs."""
    for values in itertools.product(*of_each):
        yield pytest.param(*values, marks=[] if values in some else [pytest.mark.slow])


REPLICAS = [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False)]  # and whether each has a pipeline


@pytest.mark.parametrize(
    'shard_by, topology, first_step',
    quick(
        [['file', 'record'], REPLICAS[:5], [0, 23]],
        ('file', (1, False), 0), ('file', (2, True), 23), ('record', (2, False), 0), ('record', (3, True), 23),
    ),
)  # fmt: skip
def test_replicas_are_fed_the_records_that_the_arithmetic_says(source, shard_by, topology, first_step):
    check_what_is_fed(source, make_layout(source, shard_by=shard_by), *topology, first_step)


@pytest.mark.parametrize(
    'shards, topology, first_step',
    quick(
        [[('file', 2), ('record', 6)], [(1, False), (2, True)], [0, 23]],
        (('file', 2), (2, True), 23), (('record', 6), (1, False), 23),
    ),
)  # fmt: skip
def test_compressed_files_are_fed_as_the_arithmetic_says_too(mixed_source, shards, topology, first_step):  # C24
    shard_by, logical_shards = shards
    check_what_is_fed(mixed_source, make_layout(mixed_source, logical_shards, shard_by), *topology, first_step)


def test_a_compressed_file_is_inflated_once_an_epoch_and_not_once_a_window(mixed_source, monkeypatch):
    rewinds = []
    rewind = CompressedFile._rewind
    monkeypatch.setattr(CompressedFile, '_rewind', lambda self: rewinds.append(self) or rewind(self))
    context = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    dataset = pipeline.make_train_dataset_fn(mixed_source, make_layout(mixed_source), 0)(context)
    epochs = 5
    list(dataset.take(epochs * sum(COUNTS) // GLOBAL_BATCH))
    # 3 compressed files, and what is read ahead, units of parsing, in each of which these small files fit twice.
    assert len(rewinds) <= 3 * (epochs + 8)  # once a window would be more than 80


@pytest.mark.parametrize(
    'topology, records',
    quick(
        [[REPLICAS[i] for i in (0, 1, 2, 4, 5)], [242, 100, 13, 12, 2]],
        ((1, False), 13), ((2, True), 242), ((2, True), 2), ((3, True), 13), ((4, False), 12),
    ),
)  # fmt: skip
def test_evaluation_reads_each_record_once_and_pads_the_rest_with_weight_0(mixed_source, topology, records):
    replicas, per_replica = topology
    pipelines = replicas if per_replica else 1
    steps = pipeline.eval_steps(records, GLOBAL_BATCH, pipelines)
    order = shards.permutation(sum(COUNTS), 7)[:records]
    dataset_fn = pipeline.make_eval_dataset_fn(mixed_source, GLOBAL_BATCH, order, block_records=16)
    strategy = make_strategy(replicas)
    read = []
    for batches in distributed_batches(strategy, dataset_fn, per_replica, steps):
        for batch in batches:
            counted = batch['example_weight'] > 0
            assert len(counted) == GLOBAL_BATCH // replicas
            for row in np.flatnonzero(~counted):  # what an experiment makes of a sound record is finite
                assert batch['record'][row] == 0
                assert (batch['input_ids'][row] == (batch['input_ids'][0] if counted.any() else 0)).all()
            read += batch['record'][counted].tolist()
            assert (order[batch['evaluation_place'][counted]] == batch['record'][counted]).all()
    assert sorted(read) == sorted(order)
    assert steps <= -(-records // GLOBAL_BATCH) + 1


def test_the_dataset_is_batched_at_the_per_replica_batch_size(source):
    context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    dataset = pipeline.make_train_dataset_fn(source, make_layout(source), 0)(context)
    assert dataset.element_spec['input_ids'].shape == (GLOBAL_BATCH // 4, bert_records.LENGTH)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY


def test_a_pipeline_opens_only_its_own_files(source, tmp_path):
    """Files 1, 3, 5 are away: pipeline 0 of 2 does not notice."""
    layout = make_layout(source)
    paths = tuple(p if i % 2 == 0 else str(tmp_path / 'gone') for i, p in enumerate(source.index.files))
    partial = dataclasses.replace(source, index=dataclasses.replace(source.index, files=paths))
    context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=0, num_replicas_in_sync=2)
    dataset = pipeline.make_train_dataset_fn(partial, layout, 0)(context)
    assert len(list(dataset.take(30))) == 30


def test_a_resumed_pipeline_reads_no_more_at_step_10_000_000_than_at_step_0(source, monkeypatch):
    windows = []
    window = shards.Shard.window
    monkeypatch.setattr(shards.Shard, 'window', lambda self, index: windows.append(index) or window(self, index))
    context = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    reads = []
    for first_step in (0, 10_000_000):
        windows.clear()
        next(iter(pipeline.make_train_dataset_fn(source, make_layout(source), first_step)(context)))
        reads.append(len(windows))
    # Parsing in units of 512 records and prefetching go ahead by some windows, from either step.
    assert max(reads) <= 2 * min(reads) < 400


@pytest.mark.slow
def test_ten_thousand_files_are_planned_and_read_like_any_others(tmp_path):
    """Tiny ones."""
    record = bert_records.make_record(np.random.default_rng(0))
    example = bert_records.make_example(record).SerializeToString()
    for i in range(10_000):
        with tf.io.TFRecordWriter(str(tmp_path / f'{i:05}')) as writer:
            writer.write(example)
    index = load_index(find_files(f'{tmp_path}/*', 'data.train'))
    assert index.records == 10_000
    number, by, _ = choices.choose_shards(index.counts, 64)
    assert (number, by) == (64, 'file')
    experiment = Experiment({'input_ids': Feature((bert_records.LENGTH,))}, {}, [])
    source = make_source(index, experiment, BadRecords(bert_mlm.get_config().data, print))
    layout = shards.Layout(index.counts, 64, number, by, 0, 128, 1024)
    context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    batch = next(iter(pipeline.make_train_dataset_fn(source, layout, 1000)(context)))
    assert batch['record'].numpy().tolist() == layout.replica_records(1000, 4, 2)[2].tolist()
    gc.collect()


def seen_by_prepare(source, layout, replicas, per_replica, first_step, steps):
    """(place in the run, record) -> the seed that `prepare` was given, for all that was fed."""

    def prepare(batch, seeds, training):
        assert training
        return {'record': batch['record'], 'seeds': seeds}

    dataset_fn = pipeline.make_train_dataset_fn(dataclasses.replace(source, prepare=prepare), layout, first_step)
    found = {}
    for step, batches in enumerate(
        distributed_batches(make_strategy(replicas), dataset_fn, per_replica, steps), start=first_step
    ):
        for batch in batches:
            found |= {
                (step, r): tuple(s) for r, s in zip(batch['record'].tolist(), batch['seeds'].tolist(), strict=True)
            }
    return found


def test_what_is_random_in_prepare_is_of_seed_epoch_and_record_on_any_hardware_and_after_any_restart(source):
    layout = make_layout(source)
    alone = seen_by_prepare(source, layout, 1, False, 0, steps=60)
    epochs = {seed[0] - (layout.seed << 32) for seed in alone.values()}
    assert epochs >= {0, 1} and all(seed[1] == record for (_, record), seed in alone.items())
    assert len(set(alone.values())) == len(alone)
    assert alone.items() >= seen_by_prepare(source, layout, 2, False, 40, steps=20).items()
    assert alone.items() >= seen_by_prepare(source, layout, 3, True, 23, steps=20).items()


@pytest.mark.parametrize(
    'told',
    quick([['', ', seeds', ', training', ', training=None, seeds=None', ', size=64, channels=3']], ('',), (', seeds',)),
)
def test_prepare_is_told_what_its_parameters_name(source, told):
    namespace = {}
    exec(f'def prepare(batch{told}):\n    seen.update(locals())\n    return batch', {'seen': namespace}, namespace)
    source = dataclasses.replace(source, prepare=namespace['prepare'])
    dataset = pipeline.make_eval_dataset_fn(source, GLOBAL_BATCH, np.arange(40), 16)(tf.distribute.InputContext())
    batch = next(iter(dataset))
    assert namespace.get('training', False) is False and namespace.get('size', 64) == 64
    if 'seeds' in told:
        assert namespace['seeds'].shape[-1] == 2 and namespace['seeds'].dtype == tf.int64
    assert set(batch) == {*source.features, 'record', 'example_weight', 'evaluation_place'}
