"""A step whose loss or gradient is not finite: the run stops, or goes on as if its batch had taught it nothing."""

import json

import numpy as np
import pytest

from tests import bert_records
from tests.bert_records import make_record, write_file
from tests.runs import Workdir, door, overrides, write_shallow
from tools import explain_input

SKIP = overrides(train__on_nonfinite='skip')


@pytest.fixture
def flags(tmp_path):
    """One record of 80 has a weight that is no number."""
    words = write_shallow(tmp_path) + overrides(model__dropout=0.1)
    poison(tmp_path, [13])
    return words


def poison(folder, numbers, value=np.nan):
    rng = np.random.default_rng(0)
    wrong = {'masked_lm_weights': np.full(bert_records.PREDICTIONS, value, np.float32)}
    records = [make_record(rng, **(wrong if i in numbers else {})) for i in range(20)]
    write_file(folder / 'train-1.tfrecord', records)


def step_of(capsys, flags, number):
    """The first step that reads a record of train-1."""
    capsys.readouterr()
    assert explain_input.main([*flags, '--json', '--steps=0:10']) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return next(line['step'] for line in lines if ['train-1.tfrecord', number] in line['records'])


@pytest.mark.parametrize('replicas', [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_skipped_step_leaves_weights_and_slots_as_they_were(flags, tmp_path, capsys, replicas):
    step = step_of(capsys, flags, 13)
    words = [*flags, *SKIP, *overrides(devices__replicas=replicas, checkpoint__every=1, checkpoint__keep=20)]
    assert door(*words, '--config.train.steps=10', f'--workdir={tmp_path / "run"}') == 0
    out = capsys.readouterr().out
    assert f'WARNING: the loss or gradient of step {step} is not finite; it changed nothing. Its records:' in out
    assert 'train-1.tfrecord: ' in out and ' 13' in out

    import tensorflow as tf

    before, after = (
        tf.train.load_checkpoint(str(tmp_path / 'run' / 'checkpoints' / f'ckpt-{step + i}')) for i in (0, 1)
    )
    for name in before.get_variable_to_shape_map():
        if name.startswith(('models/', 'optimizers/')) and 'iteration' not in name:
            assert np.array_equal(before.get_tensor(name), after.get_tensor(name)), name
    lines = Workdir(tmp_path / 'run').lines('train')
    assert [line['nonfinite_steps'] for line in lines] == [0] * step + [1] * (10 - step)
    assert [line['loss'] is None for line in lines] == [i == step for i in range(10)]
    assert all(np.isfinite(value).all() for value in Workdir(tmp_path / 'run').weights.values())


def test_what_is_put_back_stays_on_its_device_and_nothing_waits_for_the_host():
    """By the graph: a choice for each copy where that copy is, and none between branches, which the host would take."""
    import tensorflow as tf

    from ctl.nonfinite import snapshot

    strategy = tf.distribute.MirroredStrategy([f'/cpu:{i}' for i in range(3)])
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0]), tf.Variable([0.5])]

    @tf.function
    def step(finite):
        keep_if = snapshot(strategy, variables)
        strategy.run(lambda: [variable.assign_add(tf.ones_like(variable)) for variable in variables])
        keep_if(finite)

    step(tf.constant(False))
    assert [variable.numpy().tolist() for variable in variables] == [[1, 2], [0.5]]
    step(tf.constant(True))
    assert [variable.numpy().tolist() for variable in variables] == [[2, 3], [1.5]]
    nodes = step.get_concrete_function(tf.TensorSpec([], tf.bool)).graph.as_graph_def().node
    devices = [node.device[-5:] for node in nodes if node.op == 'SelectV2']
    assert sorted(devices) == ['CPU:0', 'CPU:0', 'CPU:1', 'CPU:1', 'CPU:2', 'CPU:2']
    assert not [node.name for node in nodes if node.op in ('If', 'StatelessIf', 'Switch')]


@pytest.mark.slow
def test_a_mean_over_steps_leaves_out_those_that_were_skipped(flags, tmp_path, capsys):
    step = step_of(capsys, flags, 13)
    for every in (1, 10):
        words = [*flags, *SKIP, *overrides(train__steps=10, log__every=every)]
        assert door(*words, f'--workdir={tmp_path / str(every)}') == 0
    each = [line['loss'] for line in Workdir(tmp_path / '1').lines('train')]
    (mean,) = [line['loss'] for line in Workdir(tmp_path / '10').lines('train')]
    assert mean == pytest.approx(np.mean([loss for i, loss in enumerate(each) if i != step]))


def test_too_many_in_a_row_stop_the_run_with_exit_3_and_the_last_good_checkpoint_is_the_newest(flags, tmp_path, capsys):
    poison(tmp_path, range(20))
    words = [*flags, *SKIP, *overrides(train__steps=20, train__max_nonfinite=3, log__every=10)]
    assert door(*words, f'--workdir={tmp_path / "run"}') == 3
    error = capsys.readouterr().err.strip()
    assert 'steps in a row' in error and 'train.max_nonfinite=3' in error and '\n' not in error
    assert not list((tmp_path / 'run').glob('checkpoints/*'))


@pytest.fixture
def skipping():
    """What skips, and takes a step number and whether each of two objectives is finite; and what it said it skipped."""
    import tensorflow as tf

    from ctl.nonfinite import NonFinite

    told = []
    nonfinite = NonFinite(True, 1000, ['first', 'second'], told.append)
    guard = tf.function(lambda each, step: nonfinite.guard(each, step, lambda finite: None))
    return nonfinite, lambda step, *each: guard(tf.constant(each), tf.constant(step, tf.int64)), told


def test_every_step_that_was_skipped_is_told_once_in_order(skipping):
    nonfinite, step, told = skipping
    for number in range(8):
        step(number, number not in (2, 5), number != 6)
        if number in (3, 4, 7):
            nonfinite.look(0.0)
    assert told == [[2], [5, 6]]
    assert {name: int(count.numpy()) for name, count in nonfinite.counts.items()} == {
        'nonfinite_steps': 3,
        'nonfinite_in_a_row': 0,
    }


def test_of_more_steps_than_are_noted_the_first_and_the_latest_are_told(skipping):
    nonfinite, step, told = skipping
    for number in range(100):
        step(number, False, True)
    step(100, True, True)
    nonfinite.look(0.0)
    assert told == [[*range(63), 99]]


def test_the_objective_that_was_not_finite_first_is_named():
    import tensorflow as tf

    from ctl.errors import GuardError
    from ctl.nonfinite import NonFinite

    nonfinite = NonFinite(False, 0, ['first', 'second'])
    for number, each in enumerate([(True, True), (True, False), (False, False)]):
        nonfinite.guard(tf.constant(each), tf.constant(number, tf.int64), lambda finite: None)
    with pytest.raises(GuardError, match='the loss or gradient of second is not finite in step 1;') as raised:
        nonfinite.look(0.0)
    assert raised.value.step == 1


def test_a_gradient_that_is_not_finite_stops_a_run_whose_loss_is(tmp_path, capsys):
    """sqrt has an infinite slope at 0. The weights would be gone, and the checkpoint of the last step with them."""
    code = '''
"""Infinite slope."""
import keras, tensorflow as tf
from ctl import losses
from ctl.config import base_config
from ctl.experiment import Experiment, Feature, Objective
def get_config():
    return base_config()
def make_experiment(config):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer='zeros')])
    def losses_of(batch, seed):
        x = tf.cast(batch['next_sentence_labels'], tf.float32)
        return {'root': losses.weighted_sum(tf.sqrt(tf.abs(model(x)[:, 0])), batch['example_weight'])}, {}
    return Experiment({'next_sentence_labels': Feature((1,))}, {'m': model},
                      [Objective('o', model.trainable_variables, losses_of, config.optimizer)])
'''
    (tmp_path / 'slope.py').write_text(code)
    data = [word for word in write_shallow(tmp_path) if '.data.' in word or 'batch_size' in word]
    words = [f'--experiment={tmp_path / "slope.py"}', *data, f'--workdir={tmp_path / "run"}']
    assert door(*words, *overrides(train__steps=1)) == 3
    error = capsys.readouterr().err.strip()
    assert 'the gradient is not finite in step 0; nothing was saved' in error and '\n' not in error
    assert not list((tmp_path / 'run').glob('checkpoints/*'))
