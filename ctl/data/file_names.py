"""What the names of the files that were found say against them."""

import collections
import os
import re
from collections.abc import Iterator, Sequence

_NUMBERED = re.compile(r'(?P<before>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<after>.*)', re.DOTALL)
MOST_NAMES, MOST_FILES = 3, 1_000_000


def doubts(train: Sequence[str], evaluation: Sequence[str]) -> list[str]:
    """What a person may not have meant, a line each; `train` and `evaluation` are paths.

    Files that are in both, or twice in one; numbered files of which some are missing; and two sets of different numbers
    side by side, as records that were made twice leave them.
    """
    lines = list(_shared(train, evaluation))
    for key, paths in (('data.train', train), ('data.eval', evaluation)):
        lines += [f'{key}: {line}' for line in (*_twice(paths), *_incomplete(paths))]
    return lines


def _shared(train: Sequence[str], evaluation: Sequence[str]) -> Iterator[str]:
    held_out = set(map(_identity, evaluation))
    both = [path for path in train if _identity(path) in held_out]
    if both:
        yield (
            f'data.train: of {len(train)} training files, {len(both)} {_are(both)} in data.eval too ({_listed(both)}): '
            'the evaluation will look better than it is. Make the glob narrower.'
        )


def _twice(paths: Sequence[str]) -> Iterator[str]:
    names = collections.defaultdict(list)
    for path in paths:
        names[_identity(path)].append(path)
    several = [each for each in names.values() if len(each) > 1]
    if several:
        yield f'{" and ".join(several[0])} are one file by {len(several[0])} names: its records count as often.'


def _incomplete(paths: Sequence[str]) -> Iterator[str]:
    """By names like train-00003-of-00016.tfrecord, which count from 0, or from 1."""
    found = collections.defaultdict(lambda: collections.defaultdict(set))
    for path in paths:
        folder, name = os.path.split(path)
        match = _NUMBERED.fullmatch(name)
        if match:
            total = (int(match['total']), len(match['number']), len(match['total']))
            found[folder, match['before'], match['after']][total].add(int(match['number']))
    for (folder, before, after), totals in sorted(found.items()):
        if len(totals) > 1:
            sets = ', '.join(f'{before}*-of-{n:0{digits}}{after}' for n, _, digits in sorted(totals))
            yield f'{folder}: has {sets} side by side. Were records made twice? Remove the old ones.'
        for (total, digits, total_digits), numbers in sorted(totals.items()):
            first = 0 if 0 in numbers or total not in numbers else 1
            missing = sorted(set(range(first, first + min(total, MOST_FILES))) - numbers)
            if missing and total <= MOST_FILES:  # beyond, it is a date or what else looks like a number of files
                names = [f'{before}{n:0{digits}}-of-{total:0{total_digits}}{after}' for n in missing]
                yield f'{folder}: {len(missing)} of {total} files {_are(missing)} not there: {_listed(names)}.'


def _identity(path: str) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


def _are(several: Sequence) -> str:
    return 'is' if len(several) == 1 else 'are'


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ', '.join(names[:MOST_NAMES]) + (f' and {more:,} more' if more > 0 else '')
