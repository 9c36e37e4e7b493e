"""Plain English: words and names that this project replaced by plainer ones stay gone from prose, docstrings, comments
and messages. `python tests/test_words.py [file ...]` lists what is left, with its place."""
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ['*.md', 'docs/*.md', 'docs/*.py', 'tests/*.py', 'nbs/*.ipynb', 'studies/**/*.ipynb', 'studies/**/*.md',
         'studies/*.py', 'setup.py', 'settings.ini', 'Makefile', '.github/**/*.yml']
# Pattern of whole words, what to write instead
WORDS = {
    r'dear(er|est)?|cheapen(s|ed|ing)?': 'costly, costs more; within the FLOPs limit',
    r'anew': 'again',
    r'who(so)?ever': 'anyone who',
    r'shall': 'must, will',
    r'by heart': 'memorise, overfit',
    r'hand(s|ed|ing)? in|handed[- ]in': 'published run, written to results/',
    r'lots': 'random draw',
    r'told|tell(s|ing)?(?! (\w+ ){0,4}apart)': 'say, log, show, distinguish',
    r'(?<!ground[\s-])truths?': 'benchmark accuracy',
    r'(?<!standard\s)deviations?': 'standard deviations',
    r'no numbers?|no finite numbers?': 'not finite',
    r'act(s|ed|ing)? (up)?on': 'used',
    r'sound': 'passes validation',
    r'verdicts?': 'the reason it was rejected',
    r'beside': 'next to, with',
    r'to (its|their) (very )?end': 'until it ends',
    r'nought|naught|lest|ere|henceforth|hitherto|thereof|thereby|wherein|whence|alas|nay': 'a plainer word',
    r'takes everything, keeps nothing': 'No-op run for ranks other than 0',
}
# Names in code: what was, what it is now
NAMES = {
    'Aside': 'NullRun', 'tell': 'broadcast', 'lead': 'on_rank0', 'Spread': 'DistributedEvaluator',
    'Remembered': 'CachedEvaluator', 'said': 'notes', 'BEYOND': 'SPACE_OVERRIDES',
}
# A space in a pattern stands for any white space, a line break included
PATTERNS = {re.compile(rf'\b(?:{words})\b'.replace(' ', r'\s+'), re.I): instead for words, instead in WORDS.items()}


def prose(text):
    "A Markdown text without code, formulas and link targets; line breaks stay."
    def blank(match):
        return '\n'*match[0].count('\n')
    for code in r'```.*?```', r'\$\$.*?\$\$', r'`[^`\n]*`', r'\]\([^)\s]*\)', r'https?://\S+':
        text = re.sub(code, blank, text, flags=re.S)
    return text


def spoken(source):
    """Line number and text of every comment, docstring and message of some Python code. A string without a space is a
    key, not a message."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ' ' in node.value.strip():
            yield node.lineno, node.value


def names(source):
    "Line number and name of everything that some Python code defines."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def in_text(text, line=1):
    "Line, word and what to write instead, for each listed word of a text that starts at `line`."
    for pattern, instead in PATTERNS.items():
        for match in pattern.finditer(text):
            yield line + text[:match.start()].count('\n'), ' '.join(match[0].split()), instead


def in_code(source):
    "The same of some Python code; IPython's own syntax is passed by."
    source = re.sub(r'^[%!].*', '', source, flags=re.M)
    for line, text in spoken(source):
        yield from in_text(prose(text), line)


def in_cell(source):
    "The same of a notebook's code cell, with the names that it defines."
    yield from in_code(source)
    for line, name in names(re.sub(r'^[%!].*', '', source, flags=re.M)):
        if name in NAMES:
            yield line, name, NAMES[name]


def offenders(path):
    "Place, word and what to write instead, for everything in one file."
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.ipynb':
        for k, cell in enumerate(json.loads(text)['cells']):
            source = ''.join(cell['source'])
            found = in_cell(source) if cell['cell_type'] == 'code' else in_text(prose(source))
            for line, word, instead in found:
                yield f'{path}: cell {k} ({cell["id"]}), line {line}', word, instead
    else:
        found = in_code(text) if path.suffix == '.py' else in_text(prose(text))
        for line, word, instead in found:
            yield f'{path}:{line}', word, instead


def texts(root=ROOT):
    "Every file with words of ours, this one aside."
    found = {path for pattern in FILES for path in root.glob(pattern)}
    return sorted(path for path in found if path.name != 'test_words.py' and '.ipynb_checkpoints' not in path.parts)


def test_listed_words_are_found_where_people_read_them(tmp_path):
    "In prose, docstrings, comments, messages and names; not in code, keys, formulas or addresses."
    notebook = tmp_path/'a.ipynb'
    code = '#| export\ndef tell(x):\n    "Whoever calls."\n    return x["verdict"], f"{x} is told", lots   # anew\n'
    text = 'Lots of prose, ground truth to tell them apart\n```\nshall\n```\n`anew` [dear](anew.md) by\nheart'
    cells = [dict(cell_type='markdown', id='m', source=text), dict(cell_type='code', id='c', source=code)]
    notebook.write_text(json.dumps(dict(cells=cells)))
    found = {(place.split(': ')[1], word) for place, word, _ in offenders(notebook)}
    assert found == {
        ('cell 0 (m), line 1', 'Lots'), ('cell 0 (m), line 5', 'dear'), ('cell 0 (m), line 5', 'by heart'),
        ('cell 1 (c), line 2', 'tell'), ('cell 1 (c), line 3', 'Whoever'), ('cell 1 (c), line 4', 'told'),
        ('cell 1 (c), line 4', 'anew')}


def test_listed_words_are_gone():
    "From all texts of the project."
    found = [f'{place}: {word!r}, write: {instead}' for path in texts() for place, word, instead in offenders(path)]
    assert texts() and not found, '\n'.join(found)


def main(*paths):
    "Print what is left in these files, or in all; the exit code says whether there was any."
    found = [row for path in map(Path, paths or texts()) for row in offenders(path)]
    for place, word, instead in found:
        print(f'{place}: {word!r}, write: {instead}')
    counts = Counter(word.lower() for _, word, _ in found)
    print(len(found), ', '.join(f'{word} {n}' for word, n in counts.most_common()))
    return bool(found)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
