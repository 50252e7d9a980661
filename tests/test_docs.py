"""The pages are true: the example runs, and every link, file, setting, flag, command and test in them is there."""

import ast
import importlib
import importlib.util
import pathlib
import re
import shlex

import numpy as np
import pytest
import tensorflow as tf

import ctl.experiment
from ctl import config as config_lib
from ctl import seeds, train
from ctl.experiment import list_experiments, load_experiment
from ctl.runtime import workdir as workdir_lib
from tests.runs import ROOT, Workdir, door, overrides
from tools import write_settings_page
from tools.__main__ import find_programs
from tools.record_files import make_example

README = ROOT / 'README.md'
PAGES = [README, ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
of_every_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)


def example() -> str:
    """The experiment in the README."""
    (code,) = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)
    return code


def without_python(page: pathlib.Path) -> str:
    return re.sub(r'```python.*?```', '', page.read_text(), flags=re.DOTALL)


def code_spans(page: pathlib.Path) -> list[str]:
    prose = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r'`([^`]+)`', prose)


def commands(page: pathlib.Path) -> list[list[str]]:
    """The words of every command in a page, from `python` or `pytest` on, whether in a block or in a line."""
    blocks = re.findall(r'^```\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)
    lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines() + [' '.join(span.split()) for span in code_spans(page)]
    found = []
    for part in (part.strip() for line in lines for part in line.split(' && ')):
        begin = re.match(r'(?:uv run (?:--\w+ [\w/.]+ )*)?(?=(?:python|pytest)\b)|.* {3}uv run (?=python\b)', part)
        if begin:
            found.append(shlex.split(part[begin.end() :], comments=True))
    return found


@pytest.mark.slow
def test_the_experiment_in_the_readme_trains_to_a_lower_loss(tmp_path):
    (tmp_path / 'digits.py').write_text(example())
    rng = np.random.default_rng(0)
    for split in ('train', 'eval'):
        with tf.io.TFRecordWriter(str(tmp_path / split)) as writer:
            for _ in range(100):
                label = rng.integers(10)
                pixels = rng.random(64, np.float32) + 2 * np.eye(10, 64, dtype=np.float32)[label]
                writer.write(make_example({'pixels': pixels, 'label': np.array([label])}).SerializeToString())
    words = overrides(data__train=tmp_path / 'train', data__eval=tmp_path / 'eval', train__steps=60, eval__every=30)
    words += overrides(optimizer__learning_rate=0.01, devices__replicas=2)
    assert door(f'--experiment={tmp_path / "digits.py"}', *words, f'--workdir={tmp_path / "run"}') == 0
    first, last = Workdir(tmp_path / 'run').lines('eval')
    assert last['loss'] < first['loss'] and last['accuracy'] > 0.5


def test_the_readme_is_short_and_leads_to_every_page():
    text = README.read_text()
    assert len(text.splitlines()) <= 170
    assert [page.name for page in PAGES[1:] if f'({page.relative_to(ROOT).as_posix()})' not in text] == []


@of_every_page
def test_every_link_leads_to_a_file_a_heading_and_a_name_that_is_defined_there(page):
    for text, target in re.findall(r'\[([^\]]*)\]\(([^)\s]+)\)', page.read_text()):
        path, _, heading = target.partition('#')
        file = (page.parent / path).resolve() if path else page
        assert file.is_file() and file.is_relative_to(ROOT), target
        if heading:
            assert heading in headings(file), target
        if file.suffix == '.py' and text.startswith('`'):
            assert text.strip('`') in names_defined_in(file), f'{text} is not in {path}'


def headings(page: pathlib.Path) -> set[str]:
    """As links name them: in lower case, with hyphens for spaces and without punctuation."""
    found = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
    return {re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in found}


def names_defined_in(path: pathlib.Path) -> set[str]:
    """Functions, methods and classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


@of_every_page
def test_every_file_that_is_named_is_there(page):
    text = page.read_text().replace('PATH/TO/ctl/', '')
    folders = r'(?:tests|ctl|experiments|tools|docs)/[\w./]*|\.ci/run|pyproject\.toml|requirements\.txt'
    for name in re.findall(rf'(?<![\w/.~])(?:{folders})', text):
        assert (ROOT / name.rstrip('.')).exists(), name


def every_setting() -> dict[str, config_lib.Setting]:
    there = {}
    for name in list_experiments():
        there |= {key: config_lib.setting(key) for key in config_lib.flatten(load_experiment(name).get_config())}
    return there


@of_every_page
def test_every_setting_that_is_named_is_there_and_may_have_the_value_it_is_given(page):
    there = every_setting()
    sections = '|'.join({key.partition('.')[0] for key in there})
    text = re.sub(r'\]\([^)]*\)', ']', without_python(page))
    for key, value in re.findall(rf'(?<![\w./])((?:{sections})\.[a-z_\d]+)\b(?!\.)(?:=([\w\'*/.-]+))?', text):
        assert key in there, key
        choices = there[key].choices
        assert not (choices and value) or value.rstrip('.').strip("'") in map(str, choices), f'{key}={value}'


@of_every_page
def test_every_flag_that_is_named_is_one_of_the_program_or_of_any(page):
    flags = {name: set(program_called(f'tools.{name}').make_flags()) for name in find_programs()}
    any_of_them = {'help', 'config', *train.PROGRAM.make_flags(), *(flag for each in flags.values() for flag in each)}
    for span in code_spans(page):
        named = re.match(r'(?:tools\.(\w+) )?--([a-z_]+)', span)
        if named:
            assert named[2] in (flags[named[1]] if named[1] else any_of_them), span


@of_every_page
def test_every_tool_and_every_part_of_an_experiment_that_is_named_is_there(page):
    for name in re.findall(r'\btools\.([a-z_]+)', without_python(page)):
        assert name in find_programs(), name
    for kind, part in re.findall(r'`(Experiment|Objective|Feature)\.(\w+)`', page.read_text()):
        assert part in getattr(ctl.experiment, kind).__dataclass_fields__, part


@of_every_page
def test_every_command_is_understood(page):
    """By the program's own parser: each flag, each key of the config, each value."""
    for words in commands(page):
        if words[0] == 'pytest':
            check_pytest(words[1:])
            continue
        by_path = re.fullmatch(r'PATH/TO/ctl/tools/(\w+)\.py', words[1])
        module, argv = (f'tools.{by_path[1]}', words[2:]) if by_path else (words[2], words[3:])
        assert by_path or words[1] == '-m', words
        if not module.startswith(('ctl.', 'tools')):
            assert importlib.util.find_spec(module), module
            continue
        program = program_called(module)
        if not argv:  # a program that is named, and no command
            continue
        make_what_is_named(argv)
        request = program.parse(argv)
        if module == 'tools.launch':
            train.PROGRAM.parse(list(request.words))


def program_called(module: str):
    return importlib.import_module('tools.__main__' if module == 'tools' else module).PROGRAM


def make_what_is_named(argv: list[str]) -> None:
    """The experiment's file, and the run of a workdir that is named alone, in this test's folder."""
    named = dict(word.removeprefix('--').split('=', 1) for word in argv if re.match(r'--(experiment|workdir)=', word))
    if named.get('experiment', '').endswith('.py'):
        path = pathlib.Path(named['experiment'])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example())
    elif 'experiment' not in named and 'workdir' in named:
        workdir = pathlib.Path(named['workdir'])
        workdir_lib.write_config(workdir, config_lib.to_json(load_experiment('bert_mlm').get_config()))
        workdir_lib.write_note(workdir, workdir_lib.Note('bert_mlm'))


def check_pytest(words: list[str]) -> None:
    """Whether the command runs tests: of the files that it names, with its words in their names and its marks."""
    options = {word: words[i + 1] for i, word in enumerate(words) if word in ('-k', '-m')}
    files = [ROOT / word for word in words if word.startswith('tests/')]
    plain = [word for word in words if word in ('-n0', '-rA') or word.startswith('--basetemp=')]
    assert len(files) + 2 * len(options) + len(plain) == len(words), words
    if options == {'-m': 'gpu'}:
        files = [ROOT / 'tests' / 'test_gpu.py']
        options = {}
    found = [test for file in files or sorted((ROOT / 'tests').glob('test_*.py')) for test in find_tests(file)]
    marks = {'': (False, None), 'slow': (True, None), 'slow or not slow': (True, None, False)}[options.get('-m', '')]
    assert [name for name, slow in found if slow in marks and options.get('-k', '') in name], words


def find_tests(path: pathlib.Path) -> list[tuple[str, bool | None]]:
    """The name of each test, and whether it is slow; None where some of its variations are."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            some = any('mark.slow' in mark for mark in marks) or None
            found.append((node.name, True if 'pytest.mark.slow' in marks else None if some else False))
    return found


@of_every_page
def test_python_in_a_page_is_python(page):
    for code in re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL):
        compile(code, str(page), 'exec')


def test_the_page_of_settings_is_what_the_code_has():
    assert write_settings_page.PAGE.read_text() == write_settings_page.page_text(), (
        'run: uv run python -m tools.write_settings_page'
    )


def test_the_list_of_tools_is_what_there_is():
    programs = find_programs()
    width = max(map(len, programs))
    listed = '\n'.join(f'{name:<{width}}  {about}' for name, about in programs.items())
    assert f'```\n{listed}\n```' in (ROOT / 'docs' / 'install.md').read_text()


def test_every_figure_that_was_measured_has_its_command_beside_it():
    rows = re.findall(r'^\| .*$', (ROOT / 'docs' / 'measured.md').read_text(), re.MULTILINE)
    figures = [row for row in rows if '| shown by |' not in row and '| ---' not in row]
    assert len(figures) > 10
    assert [row for row in figures if not re.search(r'\| `(python -m|pytest) [^|]*\|$', row)] == []


def test_the_augmentation_of_the_page_is_of_seeds_alone_and_not_made_in_an_evaluation():
    text = (ROOT / 'docs' / 'your_experiment.md').read_text(encoding='utf8').partition('## Augmentation')[2]
    namespace = {'tf': tf, 'seeds_of': seeds}
    exec(re.search('```python\n(.*?)```', text, re.DOTALL)[1], namespace)
    batch = {'image': tf.random.stateless_uniform([8, 4, 4, 1], [0, 0], 0, 256, tf.int32)}
    numbers = tf.range(8, dtype=tf.int64)
    made = {
        (epoch, training): namespace['prepare'](batch, seeds.of_readings(0, 0 * numbers + epoch, numbers), training)
        for epoch, training in ((0, True), (1, True), (0, False))
    }
    turned, again, plain = (each['image'].numpy() for each in made.values())
    np.testing.assert_allclose(plain, batch['image'].numpy() / 255, rtol=1e-6)
    assert all((a != b).any() and (a != c).any() for a, b, c in zip(turned, again, plain, strict=True))
