"""Every setting of the loop: its default, its unit, what it may be. Experiments add their own with `add_settings`."""

import dataclasses
import difflib
import json
import math
from collections.abc import Sequence

import ml_collections

from ctl.errors import UserError

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the config.

    Attributes:
      default: the value when nothing is said; its type is the type of the key.
      help: what it is, with its unit.
      choices: the only values allowed; empty for any.
      minimum: the smallest value allowed, for numbers.
      below: the first value that is too large, for numbers.
    """

    default: Value
    help: str
    choices: tuple[Value, ...] = ()
    minimum: float = -math.inf
    below: float = math.inf


BASE = {
    'train': {
        'steps': Setting(1000, 'weight updates in the whole run', minimum=1),
        'global_batch_size': Setting(32, 'examples in one weight update, over all replicas together', minimum=1),
        'microbatches': Setting(
            1, "slices of a replica's batch, summed before the all-reduce to save memory", minimum=1
        ),
        'steps_per_loop': Setting(
            100, 'most steps in one TensorFlow loop; logs, evaluations and saves cut it', minimum=1
        ),
        'seed': Setting(0, 'seed of initial weights, record order and dropout', minimum=0, below=2**31),
        'init_checkpoint': Setting(
            '', "another run's checkpoint, whose weights alone a new run starts with, at step 0; '' is none"
        ),
        'on_nonfinite': Setting(
            'stop',
            'a step whose loss or gradient is not finite stops the run, or leaves weights and slots as they were',
            choices=('stop', 'skip'),
        ),
        'max_nonfinite': Setting(10, 'such steps in a row that may be skipped', minimum=0),
        'update_order': Setting(
            'sequential',
            'with several objectives: each update sees the one before, or those of a round start from the same weights',
            choices=('sequential', 'joint'),
        ),
        'fresh_batches': Setting(
            False, 'whether each update of a step has a global batch of its own, or all share one'
        ),
        'watch_steps': Setting(
            200,
            'steps that a watched metric may stay at 0 or 1 before it is said what that means; 0 is never',
            minimum=0,
        ),
        'precision': Setting(
            'float32', 'arithmetic of the layers; weights are float32', choices=('float32', 'bfloat16')
        ),
    },
    'data': {
        'train': Setting(
            '', "glob of the training TFRecords; commas separate several; '' is the experiment's own data"
        ),
        'eval': Setting('', "glob of the evaluation TFRecords; '' is the experiment's own data"),
        'logical_shards': Setting(
            0, 'shares of the data, each with its own order; 0 chooses by files, batch and replicas', minimum=0
        ),
        'shard_by': Setting(
            'auto', 'whether a share is whole files or a run of records', choices=('auto', 'file', 'record')
        ),
        'digest': Setting('', 'of the names and records of the training files; found at the first start'),
        'block_records': Setting(128, 'records read in one sequential piece', minimum=1),
        'window_records': Setting(
            1024, 'records shuffled together; blocks come to a window from the whole share', minimum=1
        ),
        'window_mebibytes': Setting(
            1024, 'most memory of all windows together; large records make windows smaller', minimum=1
        ),
        'on_bad_record': Setting(
            'fail',
            'a damaged or wrong record stops the run, or is left out or given weight 0',
            choices=('fail', 'skip'),
        ),
        'max_bad_records': Setting(100, 'bad records, each counted once, that may be skipped', minimum=0),
    },
    'eval': {
        'every': Setting(500, 'steps between evaluations; one always comes at the end; 0 is only that one', minimum=0),
        'at_start': Setting(False, 'whether to evaluate before the first step too'),
        'steps': Setting(-1, 'global batches in one evaluation; -1 is every record once', minimum=-1),
    },
    'checkpoint': {
        'every': Setting(500, 'steps between checkpoints; one always comes at the end', minimum=1),
        'keep': Setting(3, 'newest checkpoints kept', minimum=1),
        'best_metric': Setting('', "a number of the evaluation; its best is kept in checkpoints/best; '' is none"),
        'best_mode': Setting('min', 'whether the least or the largest is the best', choices=('min', 'max')),
        'async_save': Setting(False, 'whether checkpoints are written while training goes on, from a copy in memory'),
    },
    'devices': {
        'strategy': Setting(
            'auto',
            'auto is one for 1 replica, mirrored for more; multi_worker is as TF_CONFIG or Slurm says',
            choices=('auto', 'one', 'mirrored', 'multi_worker'),
        ),
        'start_timeout': Setting(300, 'seconds that workers wait for each other', minimum=1),
        'replicas': Setting(
            0,
            'model copies on this machine; 0 is every GPU, or 1 CPU; without GPUs, N makes N virtual CPU devices',
            minimum=0,
        ),
        'all_reduce': Setting('auto', 'how gradients are summed', choices=('auto', 'nccl', 'hierarchical', 'ring')),
        'input_pipelines': Setting(
            'per_worker', 'one dataset_fn call a worker, or one a replica', choices=('per_worker', 'per_replica')
        ),
    },
    'log': {
        'every': Setting(10, 'steps between lines of metrics.jsonl and of progress', minimum=1),
    },
}

# The settings of one optimizer, a section for each objective that has its own.
OPTIMIZER = {
    'name': Setting('adamw', 'Keras optimizer', choices=('adamw', 'lamb', 'sgd', 'adam')),
    'learning_rate': Setting(1e-3, 'peak of the schedule', minimum=0),
    'warmup_steps': Setting(0, 'steps of linear warm-up', minimum=0),
    'schedule': Setting('linear', 'decay from the peak to 0 at train.steps', choices=('linear', 'cosine', 'constant')),
    'beta_1': Setting(
        0.9, 'decay of the mean gradient in adamw, adam and lamb; the momentum of sgd', minimum=0, below=1
    ),
    'beta_2': Setting(0.999, 'decay of the mean squared gradient in adamw, adam and lamb', minimum=0, below=1),
    'weight_decay': Setting(
        0.01, 'matrices shrink by this x learning rate a step, in lamb x its trust ratio too; 0 is off', minimum=0
    ),
    'clip_norm': Setting(1.0, 'largest global norm of the reduced gradient; 0 is off', minimum=0),
}

# What a later start of the same run may change. Anything else would make it another run.
CHANGEABLE = (
    *('train.steps', 'train.microbatches', 'devices.', 'eval.', 'checkpoint.', 'log.'),
    # A damaged record is out of the index from the first start on; one that is wrong keeps its place.
    *('data.on_bad_record', 'data.max_bad_records'),
    *('train.on_nonfinite', 'train.max_nonfinite', 'train.watch_steps'),
)

# Values that ask the program to choose; a later start keeps what was chosen.
AUTOMATIC = {'data.digest': '', 'data.logical_shards': 0, 'data.shard_by': 'auto'}

# Help, choices and bounds by dotted key, for every setting any loaded experiment has declared.
_settings: dict[str, Setting] = {}


def base_config(optimizers: Sequence[str] = ('optimizer',), **defaults: dict[str, Value]) -> ml_collections.ConfigDict:
    """The loop's settings as a locked ConfigDict, with an experiment's own defaults put in.

    Args:
      optimizers: the sections that hold the settings of an optimizer: with several objectives, mostly one for each.
      **defaults: per section, the defaults that differ: `base_config(train=dict(steps=600))`.

    Raises:
      UserError: for a section or key that does not exist.
    """
    config = ml_collections.ConfigDict()
    sections = {**BASE, **dict.fromkeys(optimizers, OPTIMIZER)}
    for section, settings in sections.items():
        add_settings(config, section, **settings)
    for section, values in defaults.items():
        for key, value in values.items():
            set_value(config, f'{section}.{key}', value)
    return config


def add_settings(config: ml_collections.ConfigDict, section: str, **settings: Setting) -> None:
    """Adds an experiment's own keys to `config` under `section` (`model`, mostly), with their help and bounds."""
    with config.unlocked():
        if section not in config:
            config[section] = ml_collections.ConfigDict()
        for key, setting in settings.items():
            config[section][key] = setting.default
            _settings[f'{section}.{key}'] = setting
    config.lock()


def flatten(config: ml_collections.ConfigDict) -> dict[str, Value]:
    """The leaves of `config` by dotted key, in order."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            flat.update({f'{key}.{inner}': leaf for inner, leaf in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def setting(key: str) -> Setting | None:
    """The declared setting of a dotted key; None for a key an experiment put into its config without one."""
    return _settings.get(key)


def nearest(name: str, names) -> str:
    """'did you mean ...?' with the names closest to `name`, or a list of all where none is close."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f'did you mean {" or ".join(close)}?' if close else f'there are: {", ".join(names)}'


def find(config: ml_collections.ConfigDict, key: str) -> Value:
    """The value of a dotted key.

    Raises:
      UserError: when there is no such key, at whatever depth; names the nearest ones.
    """
    node, path = config, []
    for part in key.split('.'):
        if not isinstance(node, ml_collections.ConfigDict):
            raise UserError(f'--config.{key}: {".".join(path)} is a value, not a section.')
        if part not in node:
            where = '.'.join([*path, part])
            raise UserError(f'--config.{key}: there is no key {where}; {_hint(config, node, path, part)}')
        node = node[part]
        path.append(part)
    return node


def _hint(config: ml_collections.ConfigDict, node: ml_collections.ConfigDict, path: list[str], part: str) -> str:
    """What a key that is not in section `path` may have been meant to be: one there, or one of that name elsewhere."""
    names = [str(name) for name in node]
    if difflib.get_close_matches(part, names):
        return nearest('.'.join([*path, part]), ['.'.join([*path, name]) for name in names])
    leaves: dict[str, list[str]] = {}
    for key in flatten(config):
        leaves.setdefault(key.rpartition('.')[2], []).append(key)
    close = difflib.get_close_matches(part, leaves, n=2, cutoff=0.7)
    if close:
        return f'did you mean {" or ".join(key for name in close for key in leaves[name])}?'
    return nearest(part, names)


def set_value(config: ml_collections.ConfigDict, key: str, value: Value) -> None:
    """Sets a dotted key to a value of its type; raises UserError where `find` does."""
    find(config, key)
    section, _, name = key.rpartition('.')
    node = config[section] if section else config
    node[name] = value


def parse_text(key: str, text: str, default: Value) -> str:
    """Normalises what was typed for `key` to what the flag of its type reads.

    An integer may be written 1e3 or 1000.0; 10.5 is not one.

    Raises:
      UserError: naming the key, the text and what is expected.
    """
    if isinstance(default, bool):
        if text.lower() not in ('true', 'false', '1', '0'):
            raise UserError(f'--config.{key}={text}: expected true or false.')
        return text
    if not isinstance(default, int | float):
        return text
    try:
        if isinstance(default, int):
            return str(_whole(text))
        if math.isfinite(float(text)):
            return text
    except ValueError:
        pass
    kind = 'a number' if isinstance(default, float) else 'a whole number'
    raise UserError(f'--config.{key}={text}: expected {kind}, like {default}.')


def _whole(text: str) -> int:
    """The integer that `text` is, also as 1e3 or 1000.0; raises ValueError for any other."""
    try:
        return int(text)  # of any size, where a float would round
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def validate(config: ml_collections.ConfigDict) -> None:
    """Checks every value against its setting, and the settings against each other.

    Raises:
      UserError: naming the key, the value found and what is allowed.
    """
    for key, value in flatten(config).items():
        try:
            json.dumps(value)
        except TypeError:
            raise UserError(f'{key}={value!r}: config.json cannot hold a {type(value).__name__}.') from None
        rule = setting(key)
        if rule is None:
            continue
        if rule.choices and value not in rule.choices:
            raise UserError(f'{key}={value}: choose one of {", ".join(map(str, rule.choices))}.')
        if isinstance(value, int | float) and not rule.minimum <= value < rule.below:
            bound = f'at least {rule.minimum}' if value < rule.minimum else f'below {rule.below}'
            raise UserError(f'{key}={value}: must be {bound} ({rule.help}).')
    if config.eval.steps == 0:
        raise UserError('eval.steps=0: -1 evaluates every record once; a positive number, so many global batches.')
    if bool(config.data.train) != bool(config.data.eval):
        missing, given = ('eval', 'train') if config.data.train else ('train', 'eval')
        raise UserError(f'data.{given} is set and data.{missing} is not: set both, or neither.')


def resume(config: ml_collections.ConfigDict, stored: dict | None) -> None:
    """Makes `config` the config of a run that was started with `stored`, in place; None is a new run.

    Automatic values take what the first start chose; keys in `CHANGEABLE` keep the new value.

    Args:
      config: the config of this start.
      stored: `config.json` of the run, as nested dicts.

    Raises:
      UserError: for keys whose change would make it another run, with both values.
    """
    if stored is None:
        return
    requested = flatten(config)
    before = flatten(ml_collections.ConfigDict(stored))
    for key, automatic in AUTOMATIC.items():
        if requested.get(key) == automatic and key in before:
            set_value(config, key, before[key])
    requested = flatten(ml_collections.ConfigDict(json.loads(to_json(config))))  # a tuple comes back as a list
    changed = [
        f'{key} was {before.get(key, "(not there)")!r} and is {requested.get(key, "(not there)")!r}'
        for key in {**before, **requested}
        if before.get(key) != requested.get(key) and not key.startswith(CHANGEABLE)
    ]
    if changed:
        raise UserError(
            f'this workdir holds a run with other settings: {"; ".join(changed)}. Choose another --workdir.'
        )


def to_json(config: ml_collections.ConfigDict) -> str:
    """The config as indented JSON, the text of `config.json`."""
    return json.dumps(config.to_dict(), indent=2) + '\n'
