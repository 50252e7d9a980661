"""Do the records hold what the experiment wants? Looks at some before the first step; explains any that fail later."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from ctl.data.bad_records import BadRecords
from ctl.data.images import oddity
from ctl.data.index import Index, common_folder, load_index
from ctl.errors import UserError
from ctl.experiment import Experiment, Feature

MOST_FILES, RECORDS_PER_FILE = 64, 32

# The operations that decode records' images: TensorFlow's errors have the name of the operation that failed.
DECODING = 'ctl_decodes_a_record'

INT32 = np.iinfo(np.int32)

_KINDS = {'int64_list': 'integers', 'float_list': 'floats', 'bytes_list': 'bytes'}
_KIND_OF_DTYPE = {
    'int32': 'int64_list',
    'int64': 'int64_list',
    'float32': 'float_list',
    'string': 'bytes_list',
    'image': 'bytes_list',
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Records on disk and what they mean.

    Attributes:
      index: the files, and where each record is.
      features: feature name -> `Feature`.
      names: feature name -> its name in these records.
      prepare: the experiment's own work on a parsed per-replica batch, as `Experiment` has it.
      bad: what happens to records that are wrong.
    """

    index: Index
    features: Mapping[str, Feature]
    names: Mapping[str, str]
    prepare: Callable[..., dict]
    bad: BadRecords


def make_source(index: Index, experiment: Experiment, bad: BadRecords) -> Source:
    """The records of `index` as `experiment` sees them, after a look at some; raises as `check_records` does."""
    names = check_records(index, experiment.features, bad)
    return Source(index, experiment.features, names, experiment.prepare, bad)


def check_records(index: Index, features: Mapping[str, Feature], bad: BadRecords) -> dict[str, str]:
    """Looks at the first records of up to 64 files, spread over all, and learns what the features are called in them.

    Returns:
      feature name -> its name in these records: the same, or one of `also_called`.

    Raises:
      UserError: naming the file, record and feature, what was found, what was expected and the remedy. Where bad
        records are skipped, only when all that were looked at are wrong: then the settings are, and not the records.
      GuardError: when more are wrong than allowed.
    """
    names: dict[str, str] = {}
    problems: dict[int, str] = {}
    odd: dict[str, str] = {}
    files = np.unique(np.linspace(0, len(index.files) - 1, MOST_FILES).astype(int))
    for file in files:
        start = int(index.firsts[file])
        for record in range(start, start + min(RECORDS_PER_FILE, int(index.counts[file]))):
            try:
                called = names or _find_names(index, record, features)
                check_record(index, record, features, called, first=not names)
                names = called
                odd.update(_oddities(index, record, features, called))
            except UserError as error:
                if not bad.skip:
                    raise
                problems[record] = str(error)
    if not names:
        raise UserError(next(iter(problems.values())))
    for record, problem in problems.items():
        bad.take_wrong(index, record, problem)
    if odd:
        where, what = next(iter(odd.items()))
        more = f' Of those looked at, {len(odd) - 1} more have something like it.' if len(odd) > 1 else ''
        bad.say(f'WARNING: {where} {what}.{more} tools.make_image_records stores images as viewers show them.')
    return names


def _oddities(
    index: Index, record: int, features: Mapping[str, Feature], names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(where, what) of the record's images that training sees otherwise than a person."""
    images = [names[name] for name, feature in features.items() if feature.dtype == 'image']
    example = _parse(index, record) if images else None
    for name in images:
        what = oddity(example.features.feature[name].bytes_list.value[0])
        if what:
            yield f'{index.name(record)}: feature {name}', what


def _find_names(index: Index, record: int, features: Mapping[str, Feature]) -> dict[str, str]:
    example = _parse(index, record)
    names = {}
    for name, feature in features.items():
        present = [alias for alias in (name, *feature.also_called) if alias in example.features.feature]
        if not present:
            raise UserError(_missing(index, record, name, feature, example))
        names[name] = present[0]
    return names


def check_record(
    index: Index,
    record: int,
    features: Mapping[str, Feature],
    names: Mapping[str, str],
    payload: bytes | None = None,
    first: bool = False,
) -> None:
    """Compares one record, whose `payload` may have been read already, with the features; raises UserError.

    Where it is the `first`, a setting may be wrong; where others were as they should be, the record is.
    """
    example = _parse(index, record, payload)
    for name, feature in features.items():
        if names[name] not in example.features.feature:
            raise UserError(_missing(index, record, name, feature, example))
        value = example.features.feature[names[name]]
        kind, wanted = value.WhichOneof('kind'), _KIND_OF_DTYPE[feature.dtype]
        where = f'{index.name(record)}: feature {names[name]}'
        if kind != wanted:
            raise UserError(
                f'{where} holds {_KINDS.get(kind, "nothing")}, expected {_KINDS[wanted]}. '
                f'Make the records again, with {wanted} for it.'
            )
        values = getattr(value, kind).value
        expected = 1 if feature.dtype == 'image' else int(np.prod(feature.shape))
        if len(values) != expected:
            one_number = len(feature.shape) == 1 and feature.dtype != 'image'
            remedy = _shape_remedy(feature, len(values) if one_number else 0, first)
            raise UserError(f'{where} has {len(values)} values, expected {expected}{remedy}')
        if feature.dtype == 'image':
            _check_image(where, feature, values[0], first)
        if feature.below is not None:
            wrong = [v for v in values if not 0 <= v < feature.below]
            if wrong:
                limit = f'{feature.below_setting or "its limit"}={feature.below}'
                remedy = feature.below_remedy or 'check how the records were made'
                raise UserError(f'{where} has id {wrong[0]}, which is not in [0, {limit}): {remedy}.')
        elif feature.dtype == 'int32':
            wrong = [v for v in values if not INT32.min <= v <= INT32.max]
            if wrong:
                raise UserError(f'{where} has {wrong[0]}, which is beyond int32: make the feature int64.')


def _shape_remedy(feature: Feature, value: int, first: bool) -> str:
    """The end of an error about a record of another shape; `value` is what the setting would be, 0 for nothing."""
    possible = value and feature.shape_setting and (not feature.shape_choices or value in feature.shape_choices)
    if first and possible:
        return f': set --config.{feature.shape_setting}={value}.'
    others = '' if first else ' as the records before it have'
    shape = f'Give the feature the shape ({value},)' if first and value else 'Make the records again, with one for all'
    return f'{others}. {feature.shape_remedy or shape}.'


def decode_image(encoded: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """A PNG or JPEG, string scalar -> uint8 `shape`; fails when it is neither, or of another size."""
    with tf.name_scope(DECODING):
        return tf.ensure_shape(tf.io.decode_image(encoded, channels=shape[-1], expand_animations=False), shape)


def _check_image(where: str, feature: Feature, encoded: bytes, first: bool) -> None:
    try:
        image = tf.io.decode_image(encoded, channels=feature.shape[-1], expand_animations=False)
    except tf.errors.InvalidArgumentError:
        raise UserError(f'{where} holds {len(encoded)} bytes that are no PNG or JPEG.') from None
    if tuple(image.shape) != feature.shape:
        found, wanted = ('x'.join(map(str, shape[:2])) for shape in (image.shape, feature.shape))
        height, width = image.shape[:2]
        remedy = _shape_remedy(feature, height if height == width else 0, first)
        raise UserError(f'{where} is an image of {found} pixels, expected {wanted}{remedy}')


def _parse(index: Index, record: int, payload: bytes | None = None) -> tf.train.Example:
    try:
        return tf.train.Example.FromString(index.read(record) if payload is None else payload)
    except Exception:  # protobuf's DecodeError, whose module moves between versions
        raise UserError(f'{index.name(record)} is not a tf.train.Example.') from None


def _missing(index: Index, record: int, name: str, feature: Feature, example: tf.train.Example) -> str:
    wanted = ' or '.join((name, *feature.also_called))
    found = ', '.join(sorted(example.features.feature)) or 'none'
    return f'{index.name(record)} has no feature {wanted}; it has {found}.' + (
        f' {feature.missing_remedy}' if feature.missing_remedy else ''
    )


def make_blank(source: Source) -> bytes:
    """A serialized example of zeros, to stand where a wrong record was."""
    example = tf.train.Example()
    for name, feature in source.features.items():
        value = example.features.feature[source.names[name]]
        if feature.dtype == 'image':
            with tf.init_scope():  # at once, also where a graph is being made
                value.bytes_list.value.append(tf.io.encode_png(tf.zeros(feature.shape, tf.uint8)).numpy())
            continue
        kind = _KIND_OF_DTYPE[feature.dtype]
        zeros = [b'' if kind == 'bytes_list' else 0] * int(np.prod(feature.shape))
        getattr(value, kind).value.extend(zeros)
    return example.SerializeToString()


@contextlib.contextmanager
def explained(*sources: Source, say: Callable[[str], None] = print) -> Iterator[None]:
    """Around the reading of `sources`: turns an error of the input pipeline into what the user can act on.

    A wrong record: the pipeline gives every record its number as a name; TensorFlow's parser and the pipeline's own
    check of ids put it into their messages. What decodes images names no record: then all are looked at, and `say` is
    told so first. An error that names neither, or a record that is sound, stays what it is.

    Raises:
      UserError: when files have changed, a record is wrong, or one has been damaged since its file was indexed.
      GuardError: when there are more bad records than allowed.
    """
    try:
        yield
    except tf.errors.OpError as error:
        for source in sources:
            source.bad.check()
            source.index.check_unchanged(range(len(source.index.files)))
            _explain_wrong(error, source, say)
        if isinstance(error, tf.errors.DataLossError):
            for source in sources:
                _explain_damage(source.index)
        raise


def _explain_wrong(error: tf.errors.OpError, source: Source, say: Callable[[str], None]) -> None:
    named = list(map(int, re.findall(r'Name: (\d+)\b', error.message or '')))
    if not named and DECODING in (error.message or ''):
        named = range(source.index.records)
        folder = common_folder(source.index.files)
        say(f'An image cannot be decoded: looking for it in all {len(named):,} records below {folder}')
    problem = ''
    for number in named:
        if not problem and number < source.index.records:
            try:
                check_record(source.index, number, source.features, source.names)
            except UserError as wrong:
                problem = str(wrong)
    if problem:  # raised outside of `except`, where it would be taken for a wrapper of the other
        raise UserError(f'{problem} To go on without such records: --config.data.on_bad_record=skip.')


def _explain_damage(index: Index) -> None:
    """Reads all files again for a record that was sound when its file was indexed; raises UserError for the first."""
    again = load_index(index.files, fresh=True)
    for path, before, after in zip(index.files, index.contents, again.contents, strict=True):
        new = set(after.damaged) - set(before.damaged)
        if new:
            first = min(new, key=lambda damage: damage.number)
            raise UserError(f'{path}: record {first.number} {first.problem}, and was sound before. Restore the file.')
