"""What there is to read, and how it is shared: from the config to an index and a layout."""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence

import ml_collections
import numpy as np
import rich.console

from ctl import config as config_lib
from ctl import files
from ctl.data import choices, shards
from ctl.data.bad_records import BadRecords
from ctl.data.file_names import doubts
from ctl.data.index import Index, load_index
from ctl.data.streams import FRAME_BYTES
from ctl.errors import UserError
from ctl.experiment import DefaultData
from ctl.paths import find_files


@dataclasses.dataclass(frozen=True)
class Data:
    """What there is to read, and how it is shared.

    Attributes:
      train: the training records.
      evaluation: the evaluation records.
      eval_order: the numbers of those that every evaluation takes, in a seeded order, int64 [records].
      layout: the shards and their orders.
      why: why these shards, and by how much they differ, in words.
      pipelines: input pipelines.
      default: where the experiment made the data itself.
      bad: what happens to bad records of either, and those that are known.
      batch_names: the objective that reads each global batch of a step; '' where all share one.
    """

    train: Index
    evaluation: Index
    eval_order: np.ndarray
    layout: shards.Layout
    why: str
    pipelines: int
    default: DefaultData | None
    bad: BadRecords
    batch_names: tuple[str, ...] = ('',)

    @property
    def eval_records(self) -> int:
        """How many records one evaluation takes."""
        return len(self.eval_order)

    def for_batches(self, names: Sequence[str]) -> 'Data':
        """The same, where every step reads a global batch for each name."""
        layout = dataclasses.replace(self.layout, batches_per_step=len(names))
        return dataclasses.replace(self, layout=layout, batch_names=tuple(names))


def choose_data(
    name: str,
    module: types.ModuleType,
    config: ml_collections.ConfigDict,
    say: Callable[[str], None],
    stored: dict | None = None,
) -> DefaultData | None:
    """Where no data is configured, has the experiment make its own, and puts the globs into `config`.

    With that the config is complete, and made that of the run that was started with `stored`, its config.json.

    Raises:
      UserError: when the experiment has none; for settings of another run than `stored`.
    """
    data = None
    if not config.data.train:
        if not hasattr(module, 'make_default_data'):
            raise UserError(f'data.train is not set, and {name} has no data of its own: set data.train and data.eval.')
        data = module.make_default_data(config, say)
        if stored and stored['data']['train'] != data.train and _is_there(stored['data']):
            before = stored['data']
            data = DefaultData(before['train'], before['eval'], 'what another version made, with which the run began')
        config.data.train, config.data.eval = data.train, data.eval
    for line in config_lib.resume(config, stored, module.get_config()):
        say(line)
    return data


def _is_there(data: Mapping[str, str]) -> bool:
    """Whether the files are there that a run began with, by the `data` section of its config."""
    try:
        return all(find_files(data[key], f'data.{key}') for key in ('train', 'eval'))
    except UserError:
        return False


def find_data(
    config: ml_collections.ConfigDict,
    replicas: int,
    default: DefaultData | None,
    say: Callable[[str], None],
    console: rich.console.Console | None = None,
    workers: int = 1,
    check: Callable[[], None] = lambda: None,
) -> Data:
    """Finds the files, indexes them, and shares them; writes what it chose into `config`.

    Args:
      config: with `data.train` and `data.eval` set.
      replicas: R.
      default: what the experiment made, where it did.
      say: is told of bad records, of files that may not be meant, and of evaluation records that are others than at the
        start before.
      console: where progress is shown.
      workers: processes that the replicas are spread over.
      check: is called while files are read, and may raise.

    Raises:
      UserError: for files that cannot be read, a batch that does not divide, shards that cannot be.
      GuardError: for more damaged records than allowed.
    """
    begun = config.data.digest != ''
    choices.check_batch(config.train.global_batch_size, replicas, config.train.microbatches, begun)
    bad = BadRecords(config.data, say)
    train_files, eval_files = (find_files(config.data[name], f'data.{name}') for name in ('train', 'eval'))
    for doubt in doubts(train_files, eval_files):
        say(f'WARNING: {doubt}')
    train = load_index(train_files, console, check=check)
    bad.take_damaged(train)
    if config.data.digest not in ('', train.digest):
        raise UserError(
            f'data.train={config.data.train}: these are not the files that the run began with (digest {train.digest}, '
            f'then {config.data.digest}): its order of records would change. Restore them, or choose another --workdir.'
        )
    config.data.digest = train.digest
    evaluation = load_index(eval_files, console, check=check)
    bad.take_damaged(evaluation)
    if config.data.eval_digest not in ('', evaluation.digest):
        say(
            f'WARNING: data.eval={config.data.eval}: these are not the records of the evaluations so far (digest '
            f'{evaluation.digest}, before {config.data.eval_digest}). Their numbers do not compare with what follows.'
        )
    config.data.eval_digest = evaluation.digest
    logical_shards, shard_by, why = choices.choose_shards(
        train.counts,
        config.train.global_batch_size,
        config.data.logical_shards,
        config.data.shard_by,
        compressed=bool(train.sequential.any()),
    )
    config.data.logical_shards, config.data.shard_by = logical_shards, shard_by
    files.allow_open(-(-logical_shards // workers) + 1, f'data.logical_shards={logical_shards}')
    layout = make_layout(train, config, logical_shards, shard_by)
    # Neither a function of replicas nor of how many are taken: more steps take the same records, and others.
    eval_order = shards.permutation(evaluation.records, config.train.seed)
    if config.eval.steps > 0:
        eval_order = eval_order[: config.eval.steps * config.train.global_batch_size]
    pipelines = replicas if config.devices.input_pipelines == 'per_replica' else workers
    return Data(train, evaluation, eval_order, layout, why, pipelines, default, bad)


def make_layout(index: Index, config: ml_collections.ConfigDict, logical_shards: int, shard_by: str) -> shards.Layout:
    """The layout of an index for the global batch, seed, blocks and windows of `config`."""
    block_records, window_records = choices.fit_window(
        config.data.block_records,
        config.data.window_records,
        logical_shards,
        max(1.0, float(index.sizes.mean()) - FRAME_BYTES),  # of empty records there is an error to come
        config.data.window_mebibytes << 20,
    )
    return shards.Layout(
        counts=index.counts,
        global_batch_size=config.train.global_batch_size,
        logical_shards=logical_shards,
        shard_by=shard_by,
        seed=config.train.seed,
        block_records=block_records,
        window_records=window_records,
        breaks=index.breaks,
        sequential=index.sequential,
    )
