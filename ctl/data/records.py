"""Do the records hold what the experiment wants? Looks at some before the first step; explains any that fail later."""

import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from ctl.data.index import Index
from ctl.errors import UserError
from ctl.experiment import Feature

MOST_FILES, RECORDS_PER_FILE = 64, 32

_KINDS = {'int64_list': 'integers', 'float_list': 'floats', 'bytes_list': 'bytes'}
_KIND_OF_DTYPE = {'int32': 'int64_list', 'int64': 'int64_list', 'float32': 'float_list', 'string': 'bytes_list'}


def check_records(index: Index, features: Mapping[str, Feature]) -> dict[str, str]:
    """Looks at the first records of up to 64 files, spread over all, and learns what the features are called in them.

    Returns:
      feature name -> its name in these records: the same, or one of `also_called`.

    Raises:
      UserError: naming the file, record and feature, what was found, what was expected and the remedy.
    """
    first = _parse(index, 0)
    names = {}
    for name, feature in features.items():
        present = [alias for alias in (name, *feature.also_called) if alias in first.features.feature]
        if not present:
            raise UserError(_missing(index, 0, name, feature, first))
        names[name] = present[0]
    files = np.unique(np.linspace(0, len(index.files) - 1, MOST_FILES).astype(int))
    for file in files:
        start = int(index.firsts[file])
        for record in range(start, start + min(RECORDS_PER_FILE, int(index.counts[file]))):
            check_record(index, record, features, names)
    return names


def check_record(index: Index, record: int, features: Mapping[str, Feature], names: Mapping[str, str]) -> None:
    """Compares one record with the features; raises as `check_records` does."""
    example = _parse(index, record)
    for name, feature in features.items():
        if names[name] not in example.features.feature:
            raise UserError(_missing(index, record, name, feature, example))
        value = example.features.feature[names[name]]
        kind, wanted = value.WhichOneof('kind'), _KIND_OF_DTYPE[feature.dtype]
        where = f'{index.name(record)}: feature {names[name]}'
        if kind != wanted:
            raise UserError(f'{where} holds {_KINDS.get(kind, "nothing")}, expected {_KINDS[wanted]}.')
        values = getattr(value, kind).value
        expected = int(np.prod(feature.shape))
        if len(values) != expected:
            remedy = f': set --config.{feature.shape_setting}={len(values)}' if feature.shape_setting else ''
            raise UserError(f'{where} has {len(values)} values, expected {expected}{remedy}.')
        if feature.below is not None:
            wrong = [v for v in values if not 0 <= v < feature.below]
            if wrong:
                limit = f'{feature.below_setting or "its limit"}={feature.below}'
                remedy = feature.below_remedy or 'check how the records were made'
                raise UserError(f'{where} has id {wrong[0]}, which is not in [0, {limit}): {remedy}.')


def _parse(index: Index, record: int) -> tf.train.Example:
    try:
        return tf.train.Example.FromString(index.read(record))
    except Exception:  # protobuf's DecodeError, whose module moves between versions
        raise UserError(f'{index.name(record)} is not a tf.train.Example.') from None


def _missing(index: Index, record: int, name: str, feature: Feature, example: tf.train.Example) -> str:
    wanted = ' or '.join((name, *feature.also_called))
    found = ', '.join(sorted(example.features.feature)) or 'none'
    return f'{index.name(record)} has no feature {wanted}; it has {found}.' + (
        f' {feature.missing_remedy}' if feature.missing_remedy else ''
    )


def explain(error: tf.errors.OpError, index: Index, features: Mapping[str, Feature], names: Mapping[str, str]) -> None:
    """Turns an error of the input pipeline into the UserError of the record it came from, and raises that.

    The pipeline gives every record its number as a name; TensorFlow's parser and the pipeline's own check of ids put it
    into their messages. Returns when `error` names no record, or one that is sound.
    """
    for number in map(int, re.findall(r'Name: (\d+)\b', error.message or '')):
        if number < index.records:
            check_record(index, number, features, names)
