"""The trainer: traced once, several objectives, its guards, and what it tells a user's losses."""

import re

import numpy as np
import pytest

from tests.runs import Workdir, door, overrides, relative_difference, write_data

EXPERIMENT = '''
"""A line through points, with what a test needs changed."""
import keras
import tensorflow as tf

from ctl import losses
from ctl.config import Setting, add_settings, base_config
from ctl.experiment import Experiment, Feature, Objective

traces = []
tensors = []


def get_config():
    config = base_config(train=dict(global_batch_size=8), optimizer=dict(name='sgd', learning_rate=0.05))
    add_settings(config, 'model', unused=Setting(False, 'whether the model has a weight that nothing uses'))
    return config


def make_experiment(config):
    def line(name):
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, name=name)])
        return model
    models = dict(one=line('one'), two=line('two'))
    variables = list(models['one'].trainable_variables)
    if config.model.unused:
        variables += models['two'].trainable_variables

    def squared_error(name):
        model = models[name]
        def losses_of(batch, seed):
            traces.append(seed)
            x = tf.cast(batch['input_ids'][:, :1], tf.float32) / 60
            y = tf.cast(batch['masked_lm_ids'][:, :1], tf.float32) / 60
            each = tf.reduce_sum((model(x) - y) ** 2, -1)
            {summary}
            return {returned}, {metrics}
        return losses_of

    objectives = [Objective('first', variables, squared_error('one'), config.optimizer, updates={updates})]
    if {objectives} == 2:
        objectives.append(Objective(
            'second', models['two'].trainable_variables, squared_error('two'), config.optimizer))
    return Experiment(
        features=dict(input_ids=Feature((16,)), masked_lm_ids=Feature((5,))), models=models, objectives=objectives)
'''
PAIR = "{name + '_error': losses.weighted_sum(each, batch['example_weight'])}"


def write_experiment(folder, returned=PAIR, metrics='{}', summary='pass', objectives=1, updates=1):
    path = folder / 'line.py'
    text = EXPERIMENT.replace('{returned}', returned).replace('{metrics}', metrics).replace('{summary}', summary)
    path.write_text(text.replace('{objectives}', str(objectives)).replace('{updates}', str(updates)))
    return path


def line_flags(folder, **kwargs):
    """Flags of a run of the line on made-up records."""
    data = [flag for flag in write_data(folder) if flag.startswith(('--config.data', '--config.log'))]
    return [f'--experiment={write_experiment(folder, **kwargs)}', *data]


@pytest.fixture
def modules(monkeypatch):
    """The experiment modules that the runs of a test load."""
    from ctl import experiment, flags

    loaded = []

    def load(name):
        loaded.append(experiment.load_experiment(name))
        return loaded[-1]

    monkeypatch.setattr(flags, 'load_experiment', load)
    return loaded


@pytest.mark.parametrize(
    'replicas, microbatches', [(2, 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_the_step_is_traced_once_in_50_steps(tmp_path, modules, replicas, microbatches):
    flags = line_flags(tmp_path) + overrides(
        train__steps=50, devices__replicas=replicas, train__microbatches=microbatches, eval__every=30, log__every=17
    )
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    training = [seed for seed in modules[0].traces if seed is not None]
    # A replica's step is traced once; with microbatches once more, for the weights.
    assert len(training) == replicas * (2 if microbatches > 1 else 1)
    assert len(modules[0].traces) - len(training) == replicas  # the evaluation, once


@pytest.mark.slow  # tests/test_three_objectives.py has three
def test_objectives_are_trained_in_order_each_on_its_own_variables(tmp_path):
    flags = line_flags(tmp_path, objectives=2) + overrides(train__steps=5)
    assert door(*flags, f'--workdir={tmp_path / "both"}') == 0
    both = Workdir(tmp_path / 'both')
    line = both.lines('train')[-1]
    assert line['loss'] == pytest.approx(line['first_objective'] + line['second_objective'])
    assert door(*line_flags(tmp_path), *overrides(train__steps=5), f'--workdir={tmp_path / "one"}') == 0
    one = Workdir(tmp_path / 'one')
    first = {name: value for name, value in both.weights.items() if name.startswith('models/one')}
    assert relative_difference(first, {n: v for n, v in one.weights.items() if n.startswith('models/one')}) == 0


@pytest.mark.slow
def test_an_objective_makes_as_many_updates_a_step_as_it_asks_for(tmp_path):
    assert door(*line_flags(tmp_path, updates=3), *overrides(train__steps=4), f'--workdir={tmp_path / "run"}') == 0
    iterations = [v for n, v in Workdir(tmp_path / 'run').tensors('optimizers/first').items() if v.dtype == np.int64]
    assert iterations == [12] or [int(i) for i in iterations] == [12]


def seeds_of_a_run(folder, modules, name):
    """Of 3 steps of 2 updates on 2 replicas in 2 microbatches."""
    note = 'seed is None or tf.numpy_function(lambda s: tensors.append(tuple(s)), [seed], [])'
    flags = line_flags(folder, summary=note, updates=2) + overrides(
        train__steps=3, devices__replicas=2, train__microbatches=2
    )
    assert door(*flags, f'--workdir={folder / name}') == 0
    return modules[-1].tensors


def test_every_step_update_replica_and_microbatch_has_a_seed_of_its_own(tmp_path, modules):  # C53
    seeds = seeds_of_a_run(tmp_path, modules, 'run')
    # The pass that only the weights are taken from has a third seed, besides those of the two microbatches.
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 2 * (2 + 1)
    (updates,) = Workdir(tmp_path / 'run').tensors('optimizers/first/iteration').values()
    assert int(updates) == 3 * 2


@pytest.mark.slow
def test_a_rerun_repeats_the_seeds(tmp_path, modules):  # C53
    one, two = (seeds_of_a_run(tmp_path, modules, name) for name in ('one', 'two'))
    assert sorted(one) == sorted(two)


@pytest.mark.slow
def test_two_replicas_agree_with_one_for_several_objectives(tmp_path):
    for replicas in (1, 2):
        flags = line_flags(tmp_path, objectives=2, updates=2) + overrides(train__steps=10, devices__replicas=replicas)
        assert door(*flags, f'--workdir={tmp_path / str(replicas)}') == 0
    one, two = Workdir(tmp_path / '1'), Workdir(tmp_path / '2')
    assert relative_difference(one.weights, two.weights) <= 1e-6


def test_a_loss_that_is_no_pair_is_refused_with_what_to_return(tmp_path, capsys):  # C13
    flags = line_flags(tmp_path, returned='dict(error=tf.reduce_mean(each))')
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err
    assert 'objective first: error is' in error and 'not a ctl.losses.WeightedSum' in error


def named(name):
    return PAIR.replace("name + '_error'", name)


@pytest.mark.parametrize(
    'terms, said',
    [
        (dict(returned=named("'loss'")), 'objective first: loss is a name that the report itself uses'),
        (dict(metrics=PAIR), 'objective first: it has another number called one_error'),
        (
            dict(metrics=named("'second_gradient_norm'"), objectives=2),
            'objective first: second_gradient_norm is a name',
        ),
        (dict(metrics=named("'accuracy'"), objectives=2), 'objective second: objective first has another number'),
    ],
)
def test_a_name_that_another_number_has_is_refused_before_the_first_step(tmp_path, capsys, terms, said):
    words = [*line_flags(tmp_path, **terms), f'--workdir={tmp_path / "run"}', '--dry_run']
    assert door(*words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and '\n' not in error
    if 'reserved' in error:  # and with the name that it proposes it is taken
        name = re.search(r'another name, as (\w+);', error)[1]
        own = f"'{name}' if name == 'one' else name"
        line_flags(tmp_path, **{**terms, ('returned' if 'returned' in terms else 'metrics'): named(own)})
        assert door(*words) == 0


def test_what_is_wrong_with_an_evaluation_is_found_before_the_first_step(tmp_path):
    words = line_flags(tmp_path, summary='1 / (0 if seed is None else 1)')
    for how in ([], ['--dry_run']):
        with pytest.raises(Exception, match='division by zero'):
            door(*words, *how, f'--workdir={tmp_path / "run"}')
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_report_has_the_mean_of_a_steps_updates_and_their_largest_gradient(tmp_path):
    """The same four batches, in two steps of two updates each and in four steps; no weight moves."""
    found = []
    for updates, steps in ((1, 4), (2, 2)):
        words = line_flags(tmp_path, updates=updates) + overrides(
            train__steps=steps, train__fresh_batches='true', optimizer__learning_rate=0.0
        )
        assert door(*words, f'--workdir={tmp_path / str(updates)}') == 0
        found.append(Workdir(tmp_path / str(updates)).lines('train'))
    one, two = found
    for name, of in (('loss', np.mean), ('gradient_norm', max)):
        expected = [of([line[name] for line in one[i : i + 2]]) for i in (0, 2)]
        assert [line[name] for line in two] == pytest.approx(expected, rel=1e-6), name
        assert len({line[name] for line in one}) == 4


def test_the_first_of_a_steps_updates_is_guarded_as_well_as_the_last(tmp_path, capsys):
    """Only its loss is infinite, by a term that is traced into it alone and moves no weight."""
    first_loss = 'each + (1 / tf.zeros([]) if len([s for s in traces if s is not None]) == 1 else 0.0)'
    words = line_flags(tmp_path, returned=PAIR.replace('each', first_loss), updates=2)
    assert door(*words, '--config.train.steps=1', f'--workdir={tmp_path / "run"}') == 3
    assert 'the loss became inf in step 0' in capsys.readouterr().err


@pytest.mark.slow
def test_a_mean_over_the_slice_with_weight_1_is_scaled_right_when_slices_are_equal(tmp_path):  # C13
    """(mean, 1) a replica: the objective is their mean, not their sum."""
    for replicas in (1, 2):
        mean = 'dict(error=losses.WeightedSum(tf.reduce_mean(each), tf.constant(1.0)))'
        flags = line_flags(tmp_path, returned=mean) + overrides(train__steps=3, devices__replicas=replicas)
        assert door(*flags, f'--workdir={tmp_path / str(replicas)}') == 0
    one, two = (Workdir(tmp_path / n).lines('train') for n in '12')
    assert [a['loss'] for a in one] == pytest.approx([b['loss'] for b in two], rel=1e-6)


def test_a_weight_that_no_loss_depends_on_is_refused_by_name(tmp_path, capsys):
    flags = [*line_flags(tmp_path), '--config.model.unused=true']
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert re.search('^error: objective first: its losses do not depend on .*two/kernel, .*two/bias', error)
    assert '\n' not in error


def test_a_loss_that_is_not_finite_stops_the_run_with_exit_3_and_saves_nothing_after(tmp_path, capsys):
    infinite = "each / tf.cast(batch['record'] != 11, tf.float32)"
    flags = line_flags(tmp_path, returned=PAIR.replace('each', infinite)) + overrides(
        train__steps=30, checkpoint__every=1, train__steps_per_loop=1
    )
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 3
    error = capsys.readouterr().err
    assert 'the loss became inf in step' in error or 'the loss became nan in step' in error
    assert 'optimizer.learning_rate' in error
    run = Workdir(tmp_path / 'run')
    assert all(np.isfinite(value).all() for value in run.weights.values())


@pytest.mark.slow
def test_a_summary_in_the_step_is_written_once_a_step(tmp_path):  # C51
    """When a report is due, and with its number."""
    flags = line_flags(tmp_path, summary="tf.summary.scalar('in_step', each[0])")
    words = overrides(train__steps=6, devices__replicas=2, log__every=2)
    assert door(*flags, *words, f'--workdir={tmp_path / "run"}') == 0
    assert summaries_in_steps(tmp_path / 'run') == [2, 4, 6]


@pytest.mark.slow
def test_a_summary_in_the_step_is_there_once_after_a_kill_between_checkpoints(tmp_path, monkeypatch):
    from ctl.runtime import actions

    class Killed(Exception):
        pass

    def stop_at_5(self, output):
        report(self, output)
        if int(self._step.numpy()) == 5:
            raise Killed

    report = actions.Reporter.__call__
    words = line_flags(tmp_path, summary="tf.summary.scalar('in_step', each[0])")
    words += [*overrides(train__steps=6, checkpoint__every=3), f'--workdir={tmp_path / "run"}']
    monkeypatch.setattr(actions.Reporter, '__call__', stop_at_5)
    with pytest.raises(Killed):
        door(*words)
    monkeypatch.undo()
    assert door(*words) == 0
    assert summaries_in_steps(tmp_path / 'run') == [1, 2, 3, 4, 5, 6]


def summaries_in_steps(workdir):
    """The steps of what the experiment wrote, in order."""
    import tensorflow as tf

    written = []
    for path in (workdir / 'tensorboard' / 'train').glob('events*'):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            written += [event.step for value in event.summary.value if value.tag == 'in_step']
    return sorted(written)


def test_microbatches_do_not_run_the_model_a_second_time_for_the_weights():
    """The call that only the weights are taken from must be pruned to the masks' arithmetic."""
    import keras
    import tensorflow as tf

    from ctl import losses, update
    from ctl.config import base_config
    from ctl.experiment import Objective

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    calls = tf.Variable(0)

    def losses_of(batch, seed):
        each = tf.reduce_sum(model(batch['x']) ** 2, -1)
        counted = tf.numpy_function(lambda x: (calls.assign_add(1), x)[1], [each], tf.float32, stateful=False)
        each = each + tf.stop_gradient(tf.ensure_shape(counted, each.shape) - each)
        return {'loss': losses.weighted_sum(each, batch['example_weight'])}, {}

    objective = Objective('only', model.trainable_variables, losses_of, base_config().optimizer)
    batch = {'x': tf.ones([8, 4]), 'example_weight': tf.ones([8])}
    turn = update.Turn(objective, None, batch, tf.constant([0, 0]))
    tf.function(lambda: update._run_replica(turn, update._State([], []), microbatches=4))()
    assert calls.numpy() == 4
