"""The config of a run: made from `settings.py` and an experiment's own, read from text, checked, taken up again.

Experiments import `base_config`, `add_settings` and `Setting` from here.
"""

import difflib
import json
import math
from collections.abc import Sequence

import ml_collections

from ctl.errors import UserError
from ctl.settings import BASE, OPTIMIZER, Setting, Value

# What a later start of the same run may change: how long, where, what is said and kept, and what only trades memory for
# time. Anything else would make it another run. So would `data.window_mebibytes`, which bounds memory, and
# `data.block_records`: the order of the records follows from both.
CHANGEABLE = (
    *('train.steps', 'train.steps_per_loop', 'train.microbatches', 'train.deterministic'),
    *('devices.', 'eval.', 'checkpoint.', 'log.'),
    # Where the files are. What is in them is another matter: of training files, the digest must stay.
    *('data.train', 'data.eval'),
    # A damaged record is out of the index from the first start on; one that is wrong keeps its place.
    *('data.on_bad_record', 'data.max_bad_records'),
    *('train.on_nonfinite', 'train.max_nonfinite', 'train.watch_steps'),
)

# What took the place of keys that are no more, in words: a run that began with one goes on, and is told. A key that was
# taken out and is not named here is refused in every run that has it.
REPLACED: dict[str, str] = {}

# Changed settings that are named; of more, only the number.
MOST_CHANGED = 6

# Values that ask the program to choose; a later start keeps what was chosen.
AUTOMATIC = {'data.digest': '', 'data.eval_digest': '', 'data.logical_shards': 0, 'data.shard_by': 'auto'}

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
    return f'did you mean {" or ".join(close)}?' if close else f'there are: {", ".join(names)}.'


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
            number = _whole(text)
            if abs(number) < 2**63:
                return str(number)
        elif math.isfinite(float(text)):
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


def resume(
    config: ml_collections.ConfigDict, stored: dict | None, defaults: ml_collections.ConfigDict | None = None
) -> list[str]:
    """Makes `config` the config of a run that was started with `stored`, in place; None is a new run.

    Automatic values take what the first start chose; keys in `CHANGEABLE` keep the new value.

    Args:
      config: the config of this start.
      stored: `config.json` of the run, as nested dicts.
      defaults: the experiment's `get_config()`. The run began with these where `stored` lacks a key, which came later.

    Returns:
      What the user is to know: a line for each key of `stored` that something else took the place of.

    Raises:
      UserError: for keys whose change would make it another run, with both values.
    """
    if stored is None:
        return []
    kept = flatten(ml_collections.ConfigDict(stored))
    gone = kept.keys() - flatten(config).keys()
    replaced = {key: kept.pop(key) for key in REPLACED if key in gone}
    before = kept if defaults is None else {**_as_stored(defaults), **kept}
    for key, unchosen in AUTOMATIC.items():
        if key in before and find(config, key) == unchosen:
            set_value(config, key, before[key])
    now = _as_stored(config)
    changed = [
        f'{key} was {before.get(key, "(not there)")!r} and is {now.get(key, "(not there)")!r}'
        for key in {**before, **now}
        if before.get(key) != now.get(key) and not key.startswith(CHANGEABLE)
    ]
    if changed:
        more = f'; and {len(changed) - MOST_CHANGED} more' if len(changed) > MOST_CHANGED else ''
        raise UserError(
            f'this workdir holds a run with other settings: {"; ".join(changed[:MOST_CHANGED])}{more}. Choose another '
            '--workdir.'
        )
    return [f'WARNING: {key}={value!r} of config.json is no more: {REPLACED[key]}' for key, value in replaced.items()]


def _as_stored(config: ml_collections.ConfigDict) -> dict[str, Value]:
    """The leaves of `config` as `config.json` has them, a tuple as a list, by dotted key."""
    return flatten(ml_collections.ConfigDict(json.loads(to_json(config))))


def to_json(config: ml_collections.ConfigDict) -> str:
    """The config as indented JSON, the text of `config.json`."""
    return json.dumps(config.to_dict(), indent=2) + '\n'
