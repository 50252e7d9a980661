"""Makes TFRecords for masked-LM and next-sentence training from text.

    python -m tools.make_bert_records --text='corpus/*.txt' --output=records --vocab_size=30522 --max_length=128

Text has a sentence a line and a blank line between documents, as google-research/bert wants it, in UTF-8 or with a byte
order mark; it is held in memory while it is worked on. Of a line with more tokens than a record holds, the rest goes
into further records. --text takes several globs, with commas between them. Without it, docstrings of installed Python
packages are taken: real English that is on every machine that can run this.
"""

import ast
import collections
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tokenizers
from absl import flags

from ctl.command_line import Program, Request
from ctl.commands import command
from ctl.errors import UserError
from ctl.experiment import DefaultData
from ctl.files import appears_whole, cache_folder
from ctl.paths import local_path
from tools import text_files

Documents = list[list[str]]  # documents of sentences
TokenDocuments = list[list[list[int]]]

SPECIAL_TOKENS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = range(5)

# Chosen by what a TensorFlow installation has; read in this order until there is enough.
PACKAGES = ('keras', 'numpy', 'tensorflow')
MOST_CHARACTERS = 4_000_000
TRAIN_FILES, EVAL_FILES = 8, 2
HELD_OUT = 20  # every 20th document is for evaluation
MASKED_PART = 0.15
MAKER = 2  # raise it when the code below makes other records of the same text
PASSES = 3  # over the training text, each with other pairs and other masks


def from_docstrings(vocab_size: int, max_length: int, max_predictions: int, say: Callable[[str], None]) -> DefaultData:
    """Records from docstrings, from the cache or made now; a folder there for each combination of settings."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    settings = {
        'vocab_size': vocab_size,
        'max_length': max_length,
        'max_predictions': max_predictions,
        'packages': versions,
        'maker': [MAKER, MOST_CHARACTERS, TRAIN_FILES, EVAL_FILES, HELD_OUT, MASKED_PART, PASSES],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / 'bert_docstrings' / digest
    if not folder.is_dir():
        say(
            'Making training data from the docstrings of ' + ', '.join(f'{k} {v}' for k, v in versions.items()) + ' ...'
        )
        with appears_whole(folder) as scratch:
            write_records(list(read_docstrings()), scratch, vocab_size, max_length, max_predictions)
    about = json.loads((folder / 'about.json').read_text())
    return DefaultData(
        train=str(folder / 'train-*.tfrecord'),
        eval=str(folder / 'eval-*.tfrecord'),
        about=f'{about["sentences"]:,} sentences, {about["tokens"]:,} tokens: docstrings of {", ".join(PACKAGES)}',
        references={
            'masked_lm_loss': (
                about['unigram_loss'],
                'always predicting the unigram distribution of the training tokens',
            )
        },
    )


def read_docstrings() -> Iterator[list[str]]:
    """Documents of sentences: a document is what the docstrings of one source file say, as far as it is prose.

    The files are parsed, not imported, in sorted order. A paragraph that was seen before is left out.
    """
    seen, characters = set(), 0
    for package in PACKAGES:
        for path in sorted(pathlib.Path(importlib.util.find_spec(package).origin).parent.rglob('*.py')):
            if 'tests' in path.parts or path.stem.endswith('_test'):
                continue  # much to parse, and next to no prose
            sentences = []
            for paragraph in _paragraphs(path):
                if paragraph not in seen:
                    seen.add(paragraph)
                    sentences += re.split(r'(?<=[.!?])\s+(?=[A-Z])', paragraph)
            if len(sentences) > 1:
                characters += sum(map(len, sentences))
                yield sentences
            if characters > MOST_CHARACTERS:
                return


def _paragraphs(path: pathlib.Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding='utf8'))
    except (SyntaxError, ValueError):  # a template or a test of broken sources
        return
    for node in _documented(tree):
        prose = re.sub(r'```.*?(```|\Z)', '', ast.get_docstring(node) or '', flags=re.DOTALL)
        for paragraph in re.split(r'\n\s*\n', prose):
            text = ' '.join(paragraph.split())
            if len(text) > 40 and '>>>' not in text and _looks_like_prose(text):
                yield text


def _documented(node: ast.AST) -> Iterator[ast.AST]:
    """The module, its classes and functions, and theirs, in the order of the source; nothing below statements."""
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _documented(child)


def _looks_like_prose(text: str) -> bool:
    return sum(c.isalpha() or c in ' ,.' for c in text) > 0.9 * len(text)


def write_records(documents: Documents, folder: pathlib.Path, vocab_size: int, max_length: int, max_predictions: int):
    """Learns a vocabulary; writes `train-*.tfrecord`, `eval-*.tfrecord`, `vocab.txt` and `about.json` to `folder`."""
    from tools import record_files  # imports TensorFlow

    folder.mkdir(parents=True, exist_ok=True)
    held_out = documents[HELD_OUT - 1 :: HELD_OUT]
    training = [document for i, document in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1]
    tokenizer = learn_vocabulary(list(itertools.chain.from_iterable(training)), folder, vocab_size)
    train_tokens, eval_tokens = _tokenize(training, tokenizer), _tokenize(held_out, tokenizer)
    shape = (vocab_size, max_length, max_predictions)
    train = [x for i in range(PASSES) for x in make_instances(train_tokens, np.random.default_rng(i), *shape)]
    evaluation = list(make_instances(eval_tokens, np.random.default_rng(PASSES), *shape))
    for name, instances, tokens in (('training', train, train_tokens), ('evaluation', evaluation, eval_tokens)):
        if not instances:
            raise UserError(
                f'no record for {name} can be made: its documents ({len(tokens)}) are of one sentence, and it takes a '
                f'second sentence or another document. Every {HELD_OUT}th document is held out for evaluation, so that '
                f'{2 * HELD_OUT} are always enough.'
            )
    record_files.write(folder, 'train', TRAIN_FILES, train)
    record_files.write(folder, 'eval', EVAL_FILES, evaluation)
    record_files.write_index(folder)
    about = {
        'sentences': sum(map(len, documents)),
        'tokens': sum(len(sentence) for document in train_tokens for sentence in document),
        'unigram_loss': unigram_loss(train_tokens, evaluation, vocab_size),
    }
    (folder / 'about.json').write_text(json.dumps(about, indent=2))


def learn_vocabulary(sentences: list[str], folder: pathlib.Path, vocab_size: int) -> tokenizers.BertWordPieceTokenizer:
    """Learns a lower-case WordPiece vocabulary and writes it to `vocab.txt` in `folder`; the same for the same text.

    Raises:
      UserError: when the characters of the text alone are more than `vocab_size`.
    """
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    characters = collections.Counter(itertools.chain.from_iterable(map(tokenizer.normalizer.normalize_str, sentences)))
    # Pieces inside a word would get their ids in the order of a hash table, which breaks ties differently every time.
    inside = sorted(f'##{character}' for character, _ in characters.most_common(1000) if not character.isspace())
    tokenizer.train_from_iterator(
        sentences, vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS + inside, show_progress=False
    )
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(f'vocab_size={vocab_size} is too small: single characters take {tokenizer.get_vocab_size()}.')
    tokenizer.save_model(str(folder))
    return tokenizers.BertWordPieceTokenizer(str(folder / 'vocab.txt'), lowercase=True)


def _tokenize(documents: Documents, tokenizer: tokenizers.BertWordPieceTokenizer) -> TokenDocuments:
    """The tokens of sentences, and of documents, that have any: a zero-width space has none."""
    tokenized = (
        [encoded.ids for encoded in tokenizer.encode_batch(document, add_special_tokens=False) if encoded.ids]
        for document in documents
    )
    return [document for document in tokenized if document]


def unigram_loss(training: TokenDocuments, evaluation: Sequence[dict], vocab_size: int) -> float:
    """Nats a masked token of `evaluation` costs when the frequencies of the training tokens are always predicted.

    Every token is counted once more than it occurs, so that none is impossible.
    """
    tokens = np.concatenate([sentence for document in training for sentence in document])
    frequencies = (np.bincount(tokens, minlength=vocab_size) + 1) / (len(tokens) + vocab_size)
    masked = np.concatenate([x['masked_lm_ids'][x['masked_lm_weights'] > 0] for x in evaluation])
    return float(-np.log(frequencies[masked]).mean())


def make_instances(
    documents: TokenDocuments, rng: np.random.Generator, vocab_size: int, max_length: int, max_predictions: int
) -> Iterator[dict[str, np.ndarray]]:
    """Examples of two segments, the second the true next one half of the time, with tokens masked.

    Devlin et al. 2019, section 3.1: 15 % of the tokens are to be predicted; of these 80 % become [MASK], 10 % another
    token, 10 % stay. `next_sentence_labels` is 1 for a second segment from elsewhere, which takes a second document.
    """
    room = max_length - 3  # [CLS], [SEP], [SEP]
    for number, document in enumerate(documents):
        sentences = [piece for sentence in document for piece in _pieces(sentence, room)]
        i = 0
        while i < len(sentences):
            chunk = [sentences[i]]
            i += 1
            while i < len(sentences) and sum(map(len, chunk)) < room:
                chunk.append(sentences[i])
                i += 1
            split = int(rng.integers(1, len(chunk))) if len(chunk) > 1 else 1
            first, second = sum(chunk[:split], []), sum(chunk[split:], [])
            elsewhere = len(documents) > 1 and (not second or rng.random() < 0.5)
            if not second and not elsewhere:
                continue
            if elsewhere:
                i -= len(chunk) - split  # these sentences were not used
                other = int(rng.integers(len(documents) - 1))
                other += other >= number
                start = int(rng.integers(len(documents[other])))
                second = sum(documents[other][start : start + 4], [])
            _truncate(first, second, room)
            yield _mask(first, second, int(elsewhere), rng, vocab_size, max_length, max_predictions)


def _pieces(sentence: list[int], room: int) -> Iterator[list[int]]:
    """The sentence, or where it is longer than a record has room for, parts of it of which a record takes two."""
    length = len(sentence) if len(sentence) <= room else room // 2
    yield from (sentence[start : start + length] for start in range(0, len(sentence), length))


def _truncate(first: list[int], second: list[int], room: int) -> None:
    """Shortens the longer one from its end until both fit."""
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()


def _mask(first, second, label, rng, vocab_size, max_length, max_predictions) -> dict[str, np.ndarray]:
    ids = np.array([CLASS, *first, SEPARATOR, *second, SEPARATOR])
    length = len(ids)
    candidates = np.flatnonzero(~np.isin(ids, [CLASS, SEPARATOR]))
    n = min(max_predictions, len(candidates), max(1, round(MASKED_PART * len(candidates))))
    positions = np.sort(rng.choice(candidates, n, replace=False))
    targets, chance = ids[positions], rng.random(n)
    ids[positions] = np.where(
        chance < 0.8, MASK, np.where(chance < 0.9, rng.integers(len(SPECIAL_TOKENS), vocab_size, n), targets)
    )
    after = max_predictions - n
    return {
        'input_ids': np.pad(ids, (0, max_length - length)),
        'input_mask': np.pad(np.ones(length, int), (0, max_length - length)),
        'segment_ids': np.pad(np.repeat([0, 1], [len(first) + 2, len(second) + 1]), (0, max_length - length)),
        'masked_lm_positions': np.pad(positions, (0, after)),
        'masked_lm_ids': np.pad(targets, (0, after)),
        'masked_lm_weights': np.pad(np.ones(n, np.float32), (0, after)),
        'next_sentence_labels': np.array([label]),
    }


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        'text', '', 'globs of text files; docstrings of installed packages if not given', flag_values=values
    )
    flags.DEFINE_string('output', None, 'a new folder for the records', flag_values=values)
    flags.DEFINE_integer(
        'vocab_size', 30522, 'tokens in the vocabulary', lower_bound=len(SPECIAL_TOKENS) + 1, flag_values=values
    )
    flags.DEFINE_integer('max_length', 128, 'tokens in a record', lower_bound=8, flag_values=values)
    flags.DEFINE_integer('max_predictions', 20, 'masked tokens in a record, at most', lower_bound=1, flag_values=values)


PROGRAM = Program('tools.make_bert_records', __doc__, _define, needed=('output',))


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, make)


def make(request: Request) -> None:
    """Makes the records that the flags ask for, and says what to check in them; raises UserError."""
    text, output = request.own['text'], local_path(request.own['output'], '--output')
    shape = {name: request.own[name] for name in ('vocab_size', 'max_length', 'max_predictions')}
    if os.path.lexists(output):
        raise UserError(f'--output={output}: is there already. Name a folder that is not.')
    documents = list(text_files.read_documents(text) if text else read_docstrings())
    if len(documents) < HELD_OUT:
        raise UserError(
            f'documents found: {len(documents)}. It takes {HELD_OUT}, with a blank line between them, for every '
            f'{HELD_OUT}th is held out for evaluation.'
        )
    if sum(map(len, documents)) < 2 * len(documents):
        print('warning: most documents are one sentence. Does a blank line stand between sentences of one document?')
    if shape['max_predictions'] < MASKED_PART * shape['max_length']:
        wanted = round(MASKED_PART * shape['max_length'])
        print(f'warning: --max_predictions={shape["max_predictions"]} cuts off masking: full records want {wanted}.')
    with appears_whole(output, any_will_do=False) as scratch:
        write_records(documents, scratch, **shape)
    about = json.loads((output / 'about.json').read_text())
    print(f'{about["sentences"]:,} sentences, {about["tokens"]:,} tokens. Train on them with:')
    settings = {
        'data.train': f'{output}/train-*',
        'data.eval': f'{output}/eval-*',
        **{f'model.{name}': value for name, value in shape.items()},
    }
    words = [f'--config.{key}={value}' for key, value in settings.items()]
    print(command('ctl.train', '--experiment=bert_mlm', *words))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
